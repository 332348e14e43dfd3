//! Chat templates in the style of published models.

#![cfg(feature = "text")]

use crate::support;

use remoe_model::text::{ChatTemplate, Rendering, TextError, tools_for_template};
use serde_json::{Value, json};
use support::Folder;

const MIXTRAL: &str = "{{ bos_token }}{% for message in messages %}{% if (message['role'] == 'user') != (loop.index0 % 2 == 0) %}{{ raise_exception('Conversation roles must alternate user/assistant/user/assistant/...') }}{% endif %}{% if message['role'] == 'user' %}{{ '[INST] ' + message['content'] + ' [/INST]' }}{% elif message['role'] == 'assistant' %}{{ message['content'] + eos_token }}{% else %}{{ raise_exception('Only user and assistant roles are supported!') }}{% endif %}{% endfor %}";

const QWEN: &str = r#"{%- if tools %}
    {{- '<|im_start|>system\n' }}
    {%- for tool in tools %}
        {{- tool | tojson }}
    {%- endfor %}
{%- else %}
    {%- if messages[0]['role'] == 'system' %}
        {{- '<|im_start|>system\n' + messages[0]['content'] + '<|im_end|>\n' }}
    {%- else %}
        {{- '<|im_start|>system\nYou are a helpful assistant.<|im_end|>\n' }}
    {%- endif %}
{%- endif %}
{%- for message in messages %}
    {%- if (message.role == "user") or (message.role == "system" and not loop.first) or (message.role == "assistant" and not message.tool_calls) %}
        {{- '<|im_start|>' + message.role + '\n' + message.content + '<|im_end|>' + '\n' }}
    {%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}
    {{- '<|im_start|>assistant\n' }}
{%- endif %}
"#;

const LLAMA3: &str = r#"{{- bos_token }}
{%- if not date_string is defined %}
    {%- if strftime_now is defined %}
        {%- set date_string = strftime_now("%d %b %Y") %}
    {%- else %}
        {%- set date_string = "26 Jul 2024" %}
    {%- endif %}
{%- endif %}
{%- if messages[0]['role'] == 'system' %}
    {%- set system_message = messages[0]['content']|trim %}
    {%- set messages = messages[1:] %}
{%- else %}
    {%- set system_message = "" %}
{%- endif %}
{{- "<|start_header_id|>system<|end_header_id|>\n\n" }}
{{- system_message }}
{%- if date_string | length == 11 %}{{- "<|eot_id|>" }}{%- endif %}
{%- for message in messages %}
    {%- if message.role == 'skip' %}{% continue %}{% endif %}
    {%- if message.role == 'stop' %}{% break %}{% endif %}
    {{- '<|start_header_id|>' + message['role'] + '<|end_header_id|>\n\n'+ message['content'] | trim + '<|eot_id|>' }}
{%- endfor %}
{%- if add_generation_prompt %}
    {{- '<|start_header_id|>assistant<|end_header_id|>\n\n' }}
{%- endif %}
"#;

const PYTHON: &str = r#"{% set ns = namespace(n=0) %}
{% for m in messages %}
  {% set ns.n = ns.n + 1 %}
  {% generation %}
{{ m.content.strip().split('<x>')[-1].lstrip('\n').upper() }}|{{ m | tojson }}|{{ m.get('name') }}|{{ m.role is string }}|{{ loop.last }}
  {% endgeneration %}
{% endfor %}
{{ messages | tojson(indent=2) }} {{ ns.n }} {{ [1, 'a', none, true] }} {{ {'k': 1.5} }} {{ none }} {{ messages[-1]['content'][:3] }} {{ ("x" * 3) ~ 1 }} {{ undefined_thing }}{% for k, v in messages[0].items() %}{{ k }}={{ v }};{% endfor %}
{% macro f(a, b='z') %}<{{ a }}{{ b }}>{% endmacro %}{{ f('q') }}{{ messages | map(attribute='role') | join(',') }}{{ messages | selectattr('role', 'equalto', 'user') | list | length }}
"#;

fn template(source: &str) -> ChatTemplate {
    let folder = Folder::new();
    folder.put("chat_template.jinja", source);
    folder.put(
        "tokenizer_config.json",
        json!({"bos_token": "<s>", "eos_token": {"content": "</s>", "lstrip": false}, "pad_token": null})
            .to_string(),
    );
    ChatTemplate::open(folder.path()).unwrap().unwrap()
}

fn conversation() -> Vec<Value> {
    vec![
        json!({"role": "user", "content": " Héllo <x>\n \"world\""}),
        json!({"role": "assistant", "content": "hi\tthere"}),
        json!({"role": "user", "content": "<b>&amp;</b>"}),
    ]
}

/// Expected texts: `render_jinja_template` of transformers 5.17 on the same conversation.
#[test]
fn templates_render_as_in_transformers() {
    for (source, expected) in [
        (MIXTRAL, "<s>[INST]  Héllo <x>\n \"world\" [/INST]hi\tthere</s>[INST] <b>&amp;</b> [/INST]"),
        (
            QWEN,
            "<|im_start|>system\nYou are a helpful assistant.<|im_end|>\n<|im_start|>user\n Héllo <x>\n \"world\"<|im_end|>\n<|im_start|>assistant\nhi\tthere<|im_end|>\n<|im_start|>user\n<b>&amp;</b><|im_end|>\n<|im_start|>assistant\n",
        ),
        (
            LLAMA3,
            "<s><|start_header_id|>system<|end_header_id|>\n\n<|eot_id|><|start_header_id|>user<|end_header_id|>\n\nHéllo <x>\n \"world\"<|eot_id|><|start_header_id|>assistant<|end_header_id|>\n\nhi\tthere<|eot_id|><|start_header_id|>user<|end_header_id|>\n\n<b>&amp;</b><|eot_id|><|start_header_id|>assistant<|end_header_id|>\n\n",
        ),
        (
            PYTHON,
            " \"WORLD\"|{\"role\": \"user\", \"content\": \" Héllo <x>\\n \\\"world\\\"\"}|None|True|False\nHI\tTHERE|{\"role\": \"assistant\", \"content\": \"hi\\tthere\"}|None|True|False\n<B>&AMP;</B>|{\"role\": \"user\", \"content\": \"<b>&amp;</b>\"}|None|True|True\n[\n  {\n    \"role\": \"user\",\n    \"content\": \" Héllo <x>\\n \\\"world\\\"\"\n  },\n  {\n    \"role\": \"assistant\",\n    \"content\": \"hi\\tthere\"\n  },\n  {\n    \"role\": \"user\",\n    \"content\": \"<b>&amp;</b>\"\n  }\n] 3 [1, 'a', None, True] {'k': 1.5} None <b> xxx1 role=user;content= Héllo <x>\n \"world\";<qz>user,assistant,user2",
        ),
    ] {
        assert_eq!(template(source).render(&conversation(), true).unwrap(), expected);
    }
}

#[test]
fn loop_controls_render_as_in_transformers() {
    let messages = [
        json!({"role": "system", "content": " be brief "}),
        json!({"role": "skip", "content": "a"}),
        json!({"role": "user", "content": "b"}),
        json!({"role": "stop", "content": "c"}),
        json!({"role": "user", "content": "d"}),
    ];
    assert_eq!(
        template(LLAMA3).render(&messages, false).unwrap(),
        "<s><|start_header_id|>system<|end_header_id|>\n\nbe brief<|eot_id|><|start_header_id|>user<|end_header_id|>\n\nb<|eot_id|>"
    );
}

#[test]
fn raised_exception_is_an_error_of_the_request() {
    let messages = [json!({"role": "assistant", "content": "hi"})];
    match template(MIXTRAL).render(&messages, true) {
        Err(TextError::Refused(message)) => assert!(message.starts_with("Conversation roles must")),
        other => panic!("{other:?}"),
    }
    // An exception may also be raised in a macro.
    let inside = "{% macro f() %}{{ raise_exception('no') }}{% endmacro %}{{ f() }}";
    assert!(
        matches!(template(inside).render(&[], true), Err(TextError::Refused(message)) if message == "no")
    );
}

#[test]
fn broken_template_is_an_error_of_the_model() {
    for source in [
        "{{ messages.nothing() }}",
        "{{ 1 / 0 }}",
        "{{ strftime_now('%Q%!') }}",
        "{{ nothing | tojson }}",
        "{% for a in range(90000) %}{% for b in range(90000) %}{{ b }}{% endfor %}{% endfor %}",
        "{% macro f() %}{{ f() }}{% endmacro %}{{ f() }}",
    ] {
        let error = template(source).render(&conversation(), true).unwrap_err();
        assert!(matches!(error, TextError::Template { .. }), "{source}: {error}");
        assert!(error.to_string().contains("chat_template.jinja"), "{error}");
    }
    let folder = Folder::new();
    folder.put("chat_template.jinja", "{% if %}");
    assert!(matches!(ChatTemplate::open(folder.path()), Err(TextError::Template { .. })));
}

#[test]
fn tojson_accepts_the_options_of_transformers() {
    let source = "{{ messages | tojson(separators=(',', ':'), sort_keys=true, ensure_ascii=true) }}";
    assert_eq!(
        template(source).render(&[json!({"b": "é", "a": [1, 2.0]})], false).unwrap(),
        "[{\"a\":[1,2.0],\"b\":\"\\u00e9\"}]"
    );
}

#[test]
fn templates_are_read_in_order_of_precedence() {
    let folder = Folder::new();
    let render = |folder: &Folder| {
        let template = ChatTemplate::open(folder.path()).unwrap();
        template.map(|template| template.render(&[], false).unwrap())
    };
    assert_eq!(render(&folder), None);
    folder.put("chat_template.json", json!({"chat_template": "json {{ bos_token }}"}).to_string());
    folder.put("special_tokens_map.json", json!({"bos_token": {"content": "<m>"}}).to_string());
    assert_eq!(render(&folder).unwrap(), "json <m>");
    let named = json!({"bos_token": "<s>", "chat_template": [
        {"name": "tool_use", "template": "tools"}, {"name": "default", "template": "default {{ bos_token }}"}]});
    folder.put("tokenizer_config.json", named.to_string());
    assert_eq!(render(&folder).unwrap(), "default <s>");
    folder.put("tokenizer_config.json", json!({"chat_template": "config"}).to_string());
    assert_eq!(render(&folder).unwrap(), "config");
    folder.put("chat_template.jinja", "jinja");
    assert_eq!(render(&folder).unwrap(), "jinja");
    std::fs::remove_file(folder.file("chat_template.jinja")).unwrap();
    for wrong in [json!(7), json!([]), json!([{"name": "default"}]), json!(["x"])] {
        folder.put("tokenizer_config.json", json!({"chat_template": wrong}).to_string());
        let error = ChatTemplate::open(folder.path()).unwrap_err();
        assert!(error.to_string().contains("chat_template"), "{error}");
    }
}

fn with_tools(template: &ChatTemplate) -> Result<String, TextError> {
    template.render_with(&[], Rendering { tools: Some(&[]), ..Rendering::default() })
}

#[test]
fn named_templates_are_chosen_by_tools() {
    let folder = Folder::new();
    let named = json!({"chat_template": [
        {"name": "default", "template": "plain {{ a }}"}, {"name": "tool_use", "template": "tools {{ b }}"}]});
    folder.put("tokenizer_config.json", named.to_string());
    let template = ChatTemplate::open(folder.path()).unwrap().unwrap();
    assert_eq!(template.render(&[], false).unwrap(), "plain ");
    assert_eq!(with_tools(&template).unwrap(), "tools ");
    assert_eq!((template.source_for(true), template.source()), ("tools {{ b }}", "plain {{ a }}"));
    assert!(template.reads("a") && template.reads("b") && !template.reads("c"));
}

#[test]
fn model_without_default_template_opens_and_refuses_chats() {
    let folder = Folder::new();
    let named = json!({"chat_template": [{"name": "tool_use", "template": "tools"}, {"name": "rag", "template": "r"}]});
    folder.put("tokenizer_config.json", named.to_string());
    let template = ChatTemplate::open(folder.path()).unwrap().unwrap();
    assert_eq!(with_tools(&template).unwrap(), "tools");
    let error = template.render(&[], false).unwrap_err();
    assert!(matches!(error, TextError::NoDefaultTemplate { .. }), "{error}");
    assert!(error.to_string().contains("`tool_use`, `rag`"), "{error}");
}

#[test]
fn additional_templates_are_read_from_their_folder() {
    let folder = Folder::new();
    folder.put("chat_template.jinja", "plain");
    std::fs::create_dir(folder.file("additional_chat_templates")).unwrap();
    folder.put("additional_chat_templates/tool_use.jinja", "tools");
    let template = ChatTemplate::open(folder.path()).unwrap().unwrap();
    assert_eq!(template.render(&[], false).unwrap(), "plain");
    assert_eq!(with_tools(&template).unwrap(), "tools");
}

#[test]
fn kwargs_become_variables_of_the_template() {
    let template = template("{{ enable_thinking }}{{ bos_token }}{{ reasoning_effort }}{{ tools }}");
    let kwargs = json!({"enable_thinking": false, "bos_token": "<b>", "reasoning_effort": "max"});
    let rendering =
        Rendering { kwargs: kwargs.as_object(), reasoning_effort: Some("low"), ..Rendering::default() };
    assert_eq!(template.render_with(&[], rendering).unwrap(), "False<b>maxNone");
    for name in ["messages", "tools", "add_generation_prompt"] {
        let kwargs = json!({name: []});
        let rendering = Rendering { kwargs: kwargs.as_object(), ..Rendering::default() };
        match template.render_with(&[], rendering) {
            Err(TextError::TemplateVariable { name: found }) => assert_eq!(found, name),
            other => panic!("{other:?}"),
        }
    }
}

#[test]
fn reasoning_has_every_name_that_templates_read() {
    let template = template("{{ messages[0] | tojson }}");
    for name in ["reasoning", "thinking", "reasoning_content"] {
        let text = template.render(&[json!({"role": "assistant", name: "t", "x": null})], false).unwrap();
        let message: Value = serde_json::from_str(&text).unwrap();
        assert_eq!(
            (&message["thinking"], &message["reasoning_content"]),
            (&json!("t"), &json!("t")),
            "{name}"
        );
        assert!(message.get("x").is_none());
    }
}

#[test]
fn variables_are_free_unless_the_template_sets_them() {
    let source = "{% set own = 1 %}{{ own }}{% for m in messages %}{{ m.a }}{{ loop.index }}{% endfor %}\
                  {% if not later is defined %}{% set later = 1 %}{% endif %}\
                  {% macro f(p) %}{{ p }}{{ inside }}{% endmacro %}{{ f('text_only') }}{# in_comment #}";
    let template = template(source);
    for name in ["messages", "later", "inside"] {
        assert!(template.reads(name), "{name}");
    }
    for name in ["own", "m", "a", "loop", "p", "f", "text_only", "in_comment"] {
        assert!(!template.reads(name), "{name}");
    }
}

/// The template reads a description and properties of every tool, as that of gpt-oss does.
#[test]
fn tools_without_optional_fields_render() {
    let template = template(
        "{% for tool in tools %}{% set f = tool.function %}{{ '// ' + f.description + '\n' + f.name }}\
         {% if f.parameters and f.parameters.properties %}{% for k, v in f.parameters.properties.items() %}{{ k }}{% endfor %}\
         {% else %}(){% endif %}{% endfor %}",
    );
    let tools = [json!({"type": "function", "function": {"name": "now"}})];
    let render =
        |tools: &[Value]| template.render_with(&[], Rendering { tools: Some(tools), ..Rendering::default() });
    assert!(matches!(render(&tools), Err(TextError::Template { .. })));
    assert_eq!(render(&tools_for_template(&tools)).unwrap(), "// \nnow()");
}
