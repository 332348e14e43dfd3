//! Chat templates with the helpers and idioms of published ones, written for these tests, and templates
//! that exceed the limits of a rendering.
//!
//! Expected texts: Jinja2 3.1, sandboxed, with `trim_blocks`, `lstrip_blocks` and loop controls, which
//! is the environment of transformers.

#![cfg(feature = "text")]

use remoe_model::text::{ChatTemplate, Rendering, TextError};
use serde_json::{Value, json};
use std::time::Instant;

fn template(source: &str) -> ChatTemplate {
    let folder = tempfile::tempdir().unwrap();
    std::fs::write(folder.path().join("chat_template.jinja"), source).unwrap();
    let config = json!({"bos_token": "<s>", "eos_token": "</s>"});
    std::fs::write(folder.path().join("tokenizer_config.json"), config.to_string()).unwrap();
    ChatTemplate::open(folder.path()).unwrap().unwrap()
}

fn render(source: &str, messages: &[Value]) -> String {
    template(source).render(messages, true).unwrap_or_else(|error| panic!("{error}"))
}

fn refusal(source: &str, messages: &[Value]) -> String {
    match template(source).render(messages, true) {
        Err(TextError::Refused(message)) => message,
        other => panic!("{other:?}"),
    }
}

fn failure(source: &str, messages: &[Value]) -> String {
    match template(source).render(messages, true) {
        Err(error @ TextError::Template { .. }) => error.to_string(),
        other => panic!("{:?}", other.map(|text| text.len())),
    }
}

fn say(role: &str, content: &str) -> Value {
    json!({"role": role, "content": content})
}

/// Template in the style of Mistral: instructions in brackets, the system text in the last user turn, turns
/// that must alternate, arguments of calls as JSON.
const BRACKETS: &str = r#"{%- if messages[0].role == "system" %}
    {%- set instructions = messages[0].content %}
    {%- set turns = messages[1:] %}
{%- else %}
    {%- set turns = messages %}
{%- endif %}
{%- set seen = namespace(users=0, index=0) %}
{%- for turn in turns | rejectattr("role", "equalto", "tool") %}
    {%- if turn.tool_calls is undefined %}
        {%- if (turn.role == "user") != (seen.index % 2 == 0) %}
            {{- raise_exception("after the optional system message, turns alternate: " ~ turn.role ~ " at " ~ seen.index) }}
        {%- endif %}
        {%- set seen.index = seen.index + 1 %}
    {%- endif %}
    {%- if turn.role == "user" %}{% set seen.users = seen.users + 1 %}{% endif %}
{%- endfor %}
{{- bos_token }}
{%- set current = namespace(user=0) %}
{%- for turn in turns %}
    {%- if turn["role"] == "user" %}
        {%- set current.user = current.user + 1 %}
        {%- if instructions is defined and current.user == seen.users %}
            {{- "[INST] " + instructions + "\n\n" + turn["content"] + "[/INST]" }}
        {%- else %}
            {{- "[INST] " + turn["content"] + "[/INST]" }}
        {%- endif %}
    {%- elif turn.tool_calls is defined and turn.tool_calls | length > 0 %}
        {{- "[CALLS] [" }}
        {%- for call in turn.tool_calls %}
            {%- set out = call.function | tojson %}
            {{- out[:-1] }}
            {%- if call.id is not defined or call.id | length != 9 %}
                {{- raise_exception("ids of calls have nine characters") }}
            {%- endif %}
            {{- ', "id": "' + call.id + '"}' }}
            {%- if not loop.last %}{{- ", " }}{% else %}{{- "]" + eos_token }}{% endif %}
        {%- endfor %}
    {%- elif turn["role"] == "assistant" %}
        {{- " " + turn["content"] | trim + eos_token }}
    {%- elif turn["role"] == "tool" %}
        {{- "[RESULT] {\"content\": " + turn.content | tojson + "}[/RESULT]" }}
    {%- else %}
        {{- raise_exception("no such role: " + turn["role"]) }}
    {%- endif %}
{%- endfor %}
"#;

#[test]
fn mistral_style_template_renders_as_in_jinja2() {
    let messages = [
        say("system", "Be brief."),
        say("user", "Weather?"),
        say("assistant", " Where? "),
        say("user", "\"Here\" & <there>"),
    ];
    assert_eq!(
        render(BRACKETS, &messages),
        "<s>[INST] Weather?[/INST] Where?</s>[INST] Be brief.\n\n\"Here\" & <there>[/INST]"
    );
    let call = json!({
        "role": "assistant", "content": "",
        "tool_calls": [{"id": "abcdefghi", "function": {"name": "find", "arguments": {"what": "é\n", "top": 3}}}],
    });
    let result = json!({"role": "tool", "content": "a \"b\"", "tool_call_id": "abcdefghi"});
    assert_eq!(
        render(BRACKETS, &[say("user", "Find."), call.clone(), result, say("assistant", "Done.")]),
        "<s>[INST] Find.[/INST][CALLS] [{\"name\": \"find\", \"arguments\": {\"what\": \"é\\n\", \"top\": 3}, \"id\": \"abcdefghi\"}]</s>[RESULT] {\"content\": \"a \\\"b\\\"\"}[/RESULT] Done.</s>"
    );
    assert_eq!(
        refusal(BRACKETS, &[say("user", "a"), say("user", "b")]),
        "after the optional system message, turns alternate: user at 1"
    );
    assert_eq!(
        refusal(BRACKETS, &[say("robot", "a")]),
        "after the optional system message, turns alternate: robot at 0"
    );
    let mut short = call;
    short["tool_calls"][0]["id"] = json!("x");
    assert_eq!(refusal(BRACKETS, &[say("user", "a"), short]), "ids of calls have nine characters");
}

/// Template in the style of Llama 3: headers, a date, a macro, `is string`, `is mapping`, `is iterable`,
/// filters with arguments, statements on lines of their own.
const HEADERS: &str = r#"{{ bos_token }}
{% macro head(role) -%}
<|head|>{{ role }}<|/head|>

{% endmacro %}
{%- if not today is defined %}
  {%- set today = strftime_now("%Y-%m-%d") if strftime_now is defined else "2024-07-26" %}
{%- endif %}
{{- head("system") }}
{{- "Today: " }}{{ today | length }}
{% for message in messages if message.role != "system" %}
    {% if message.content is string %}
{{ head(message.role) }}{{ message.content | trim }}<|end|>
    {%- elif message.content is iterable and message.content is not mapping %}
{{ head(message.role) }}{{ message.content | map(attribute="text") | join(" + ") }}<|end|>
    {%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}
{{ head("assistant") }}
{%- endif %}
"#;

#[test]
fn llama3_style_template_renders_as_in_jinja2() {
    let parts = json!({"role": "user", "content": [{"text": "one"}, {"text": "two"}]});
    assert_eq!(
        render(HEADERS, &[say("system", "x"), say("user", " hi \n"), parts]),
        "<s>\n<|head|>system<|/head|>\n\nToday: 10\n<|head|>user<|/head|>\n\nhi<|end|><|head|>user<|/head|>\n\none + two<|end|><|head|>assistant<|/head|>\n\n"
    );
}

/// Template in the style of Qwen 3: a reversed list, reasoning removed with `split`, `startswith`,
/// `rstrip`, a namespace that finds the last question, `loop.previtem` and `loop.nextitem`.
const THOUGHTS: &str = r#"{%- set ns = namespace(searching=true, last=messages|length - 1) %}
{%- for message in messages[::-1] %}
    {%- set index = (messages|length - 1) - loop.index0 %}
    {%- if ns.searching and message.role == "user" and not (message.content.startswith('<result>') and message.content.endswith('</result>')) %}
        {%- set ns.searching = false %}
        {%- set ns.last = index %}
    {%- endif %}
{%- endfor %}
{%- for message in messages %}
    {%- set content = message.content %}
    {%- if message.role == "assistant" %}
        {%- set thought = '' %}
        {%- if '</think>' in content %}
            {%- set thought = content.split('</think>')[0].rstrip('\n').split('<think>')[-1].lstrip('\n') %}
            {%- set content = content.split('</think>')[-1].lstrip('\n') %}
        {%- endif %}
        {%- if loop.index0 > ns.last and (loop.last or thought) %}
            {{- '<|start|>assistant\n<think>\n' + thought.strip('\n') + '\n</think>\n\n' + content.lstrip('\n') }}
        {%- else %}
            {{- '<|start|>assistant\n' + content }}
        {%- endif %}
        {{- '<|end|>\n' }}
    {%- elif message.role == "tool" %}
        {%- if loop.first or loop.previtem.role != "tool" %}
            {{- '<|start|>user' }}
        {%- endif %}
        {{- '\n<result>\n' }}
        {{- content }}
        {{- '\n</result>' }}
        {%- if loop.last or loop.nextitem.role != "tool" %}
            {{- '<|end|>\n' }}
        {%- endif %}
    {%- else %}
        {{- '<|start|>' ~ message.role ~ '\n' ~ content ~ '<|end|>\n' }}
    {%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}
    {{- '<|start|>assistant\n' }}
    {%- if enable_thinking is defined and enable_thinking is false %}
        {{- '<think>\n\n</think>\n\n' }}
    {%- endif %}
{%- endif %}
"#;

#[test]
fn qwen3_style_template_renders_as_in_jinja2() {
    let messages = [
        say("user", "1?"),
        say("assistant", "<think>\nold\n</think>\n\nOne."),
        say("user", "2?"),
        say("tool", "a"),
        say("tool", "b"),
        say("assistant", "<think>\nnew\n</think>\n\nTwo."),
    ];
    assert_eq!(
        render(THOUGHTS, &messages),
        "<|start|>user\n1?<|end|>\n<|start|>assistant\nOne.<|end|>\n<|start|>user\n2?<|end|>\n<|start|>user\n<result>\na\n</result>\n<result>\nb\n</result><|end|>\n<|start|>assistant\n<think>\nnew\n</think>\n\nTwo.<|end|>\n<|start|>assistant\n"
    );
}

/// Template in the style of DeepSeek: `default` in a set, a namespace of flags, text outside of expressions
/// with marks beyond ASCII, everything on one line.
const MARKS: &str = "{% if not add_generation_prompt is defined %}{% set add_generation_prompt = false %}{% endif %}{% set ns = namespace(is_first=true, is_tool=false, system='') %}{%- for message in messages %}{%- if message['role'] == 'system' %}{% set ns.system = ns.system + ('' if ns.is_first else '\n\n') + message['content'] %}{% set ns.is_first = false %}{%- endif %}{%- endfor %}{{ bos_token }}{{ ns.system }}{%- for message in messages %}{%- if message['role'] == 'user' %}{%- set ns.is_tool = false -%}{{'<｜User｜>' + message['content']}}{%- endif %}{%- if message['role'] == 'assistant' and message['content'] is not none %}{% set content = message['content'] | default('', true) %}{{'<｜Assistant｜>' + content + '<｜end▁of▁sentence｜>'}}{%- endif %}{%- endfor -%}{% if add_generation_prompt and not ns.is_tool %}{{'<｜Assistant｜>'}}{% endif %}";

#[test]
fn deepseek_style_template_renders_as_in_jinja2() {
    let messages = [
        say("system", "A"),
        say("system", "B"),
        say("user", "你好"),
        // transformers drops a null content, which is therefore undefined.
        json!({"role": "assistant", "content": null}),
        say("assistant", "hé"),
        say("user", "x"),
    ];
    assert_eq!(
        render(MARKS, &messages),
        "<s>A\n\nB<｜User｜>你好<｜Assistant｜><｜end▁of▁sentence｜><｜Assistant｜>hé<｜end▁of▁sentence｜><｜User｜>x<｜Assistant｜>"
    );
    assert_eq!(template(MARKS).render(&messages[..1], false).unwrap(), "<s>A");
}

#[test]
fn blocks_are_trimmed_and_stripped() {
    for (source, expected) in [
        // A line with only a statement leaves no text.
        ("a\n  {% if true %}\n  b\n  {% endif %}\nc", "a\n  b\nc"),
        // An expression keeps its line.
        ("a\n  {{ 'b' }}\nc", "a\n  b\nc"),
        // `+` keeps white space that would be stripped or trimmed, `-` strips more of it.
        ("a\n  {%+ if true +%}\n  b{% endif %}", "a\n  \n  b"),
        ("a\n\n  {%- if true -%}\n\n  b{% endif %}", "ab"),
        ("a {#- gone -#} b", "ab"),
        ("a\n  {# gone #}\nb", "a\nb"),
        // One line end at the end of the template is removed.
        ("a\n", "a"),
        ("a\n\n", "a\n"),
        ("{% raw %}{{ a }}{% endraw %}", "{{ a }}"),
    ] {
        assert_eq!(render(source, &[]), expected, "{source:?}");
    }
}

#[test]
fn dates_follow_their_format() {
    for (format, length) in
        [("%d %b %Y", 11), ("%Y-%m-%d", 10), ("%H:%M:%S", 8), ("%B", 0), ("%A, %j", 0), ("%%", 1)]
    {
        let text = render(&format!("{{{{ strftime_now('{format}') }}}}"), &[]);
        assert!(if length == 0 { text.len() > 2 } else { text.len() == length }, "{format}: {text:?}");
        assert!(!text.contains('%') || format == "%%", "{format}: {text:?}");
    }
}

#[test]
fn break_and_continue_act_on_the_inner_loop() {
    let source = "{% for n in range(10) %}{% if n == 1 %}{% continue %}{% endif %}{% if n > 3 %}{% break %}{% endif %}{{ n }}{% else %}none{% endfor %}";
    assert_eq!(render(source, &[]), "023");
    assert_eq!(render("{% for n in [] %}{{ n }}{% else %}none{% endfor %}", &[]), "none");
    // `break` and `continue` act on the inner loop only.
    let nested = "{% for a in range(3) %}{% for b in range(3) %}{% if b == a %}{% break %}{% endif %}{{ a }}{{ b }} {% endfor %}{% endfor %}";
    assert_eq!(render(nested, &[]), "10 20 21 ");
    let pairs = "{% for role, group in messages | groupby('role') %}{{ role }}{{ group | length }}{% endfor %}{{ loop is defined }}";
    assert_eq!(render(pairs, &[say("b", ""), say("a", ""), say("b", "")]), "a1b2False");
}

#[test]
fn json_equals_that_of_python() {
    let messages = [json!({
        "role": "user", "content": "<a href='x'>\u{2028}\u{7f}", "n": [1, 1.0, 1e22, -0.5, true, null],
        "o": {"z": {}, "a": []},
    })];
    for (source, expected) in [
        (
            "{{ messages[0] | tojson }}",
            "{\"role\": \"user\", \"content\": \"<a href='x'>\u{2028}\u{7f}\", \"n\": [1, 1.0, 1e+22, -0.5, true, null], \"o\": {\"z\": {}, \"a\": []}}",
        ),
        ("{{ messages[0].o | tojson(indent=4) }}", "{\n    \"z\": {},\n    \"a\": []\n}"),
        ("{{ messages[0].n | tojson(separators=[',', ':']) }}", "[1,1.0,1e+22,-0.5,true,null]"),
        ("{{ 'é' | tojson(ensure_ascii=true) }}", "\"\\u00e9\""),
        ("{{ none | tojson }}{{ 'a\"b' | tojson }}", "null\"a\\\"b\""),
        ("{{ (messages[0].o | tojson(sort_keys=true)) ~ '<' }}", "{\"a\": [], \"z\": {}}<"),
    ] {
        assert_eq!(render(source, &messages), expected, "{source}");
    }
}

/// The templates would run or write endlessly.
#[test]
fn endless_loops_are_refused() {
    let long = [say("user", &"x".repeat(1 << 20))];
    let short = [say("user", "x")];
    for (source, messages) in [
        ("{% for a in range(99999) %}{% for b in range(99999) %}{% endfor %}{% endfor %}", &short),
        // Long texts: written, printed as a list, captured in a block, in a macro.
        ("{% for a in range(9999) %}{{ messages[0].content }}{% endfor %}", &long),
        ("{% for a in range(9999) %}{{ messages }}{% endfor %}", &long),
        ("{% set t %}{% for a in range(9999) %}{{ messages[0].content }}{% endfor %}{% endset %}x", &long),
        (
            "{% macro m() %}{% for a in range(9999) %}{{ messages[0].content }}{% endfor %}{% endmacro %}{% set t = m() %}x",
            &long,
        ),
        ("{{ 'x' * 90000000 }}", &short),
        ("{% macro m(n) %}{{ m(n + 1) }}{% endmacro %}{{ m(0) }}", &short),
        // The deepest value that the limit of steps allows, and operations that recurse through it.
        (
            "{% set ns = namespace(a=[]) %}{% for j in range(9999) %}{% for i in range(9999) %}{% set ns.a = [ns.a] %}{% endfor %}{% endfor %}",
            &short,
        ),
    ] {
        let message = failure(source, messages);
        let reasons = ["fuel", "recursion", "longer than", "nested deeper"];
        assert!(reasons.iter().any(|reason| message.contains(reason)), "{source}: {message}");
        assert!(message.contains("chat_template.jinja"), "{message}");
    }
    let deep = |end: &str| {
        format!(
            "{{% set ns = namespace(a=[], b=[]) %}}{{% for j in range(10) %}}{{% for i in range(9999) %}}{{% set ns.a = [ns.a] %}}{{% set ns.b = [ns.b] %}}{{% endfor %}}{{% endfor %}}{end}"
        )
    };
    assert!(failure(&deep("x"), &short).contains("nested deeper than 200 levels"));
    // Nesting as deep as the template is long.
    let straight = |end: &str| format!("{{% set x = [] %}}{}{end}", "{% set x = [x] %}".repeat(50_000));
    for end in [
        "x",
        "{{ x == x }}",
        "{{ x }}",
        "{{ x | tojson }}",
        "{{ x ~ '' }}",
        "{{ [x] | sort }}",
        "{{ x in [x] }}",
    ] {
        assert!(failure(&straight(end), &short).contains("nested deeper than 200 levels"));
    }
}

/// The templates would build values that exceed the memory or contain themselves; a single step can double a
/// text.
#[test]
fn enormous_values_are_not_built() {
    let short = [say("user", "x")];
    let grow = |step: &str, end: &str| {
        format!(
            "{{% set ns = namespace(x='ab', l=['ab']) %}}{{% for i in range(60) %}}{{% set ns.x = {step} %}}{{% endfor %}}{end}"
        )
    };
    let list =
        |step: &str, end: &str| grow("ns.x", "").replace("ns.x = ns.x", &format!("ns.l = {step}")) + end;
    let straight = |end: &str| format!("{{% set x = ['ab'] %}}{}{end}", "{% set x = [x, x] %}".repeat(60));
    for source in [
        // Values that contain themselves, built in every way.
        "{% set ns = namespace() %}{% set ns.x = ns %}{{ ns | tojson }}".to_owned(),
        "{% set ns = namespace() %}{% set ns.x = ns %}{{ ns }}".to_owned(),
        "{% set ns = namespace() %}{% set ns.x = [{'a': ns}] %}{{ ns == ns }}".to_owned(),
        "{% set a = namespace() %}{% set b = namespace(a=a) %}{% set a.b = b %}{{ a | string }}".to_owned(),
        "{% set a = namespace() %}{% set b = namespace() %}{% set a.b = b if true else 1 %}{% set b.a = a %}{{ a < b }}".to_owned(),
        "{% set ns = namespace() %}{% set ns.x = ns | chain({}) %}{{ ns }}".to_owned(),
        // Large values built in one step.
        "{% set x = 'x' * 99999999 %}".to_owned(),
        "{{ 'a\nb' | indent(1000000000000) }}".to_owned(),
        "{{ 'a\nb' | indent(width=1000000000000) }}".to_owned(),
        "{{ [1] | batch(1000000000000, 0) | list }}".to_owned(),
        "{{ [1] | slice(1000000000000) | list }}".to_owned(),
        "{{ '%1000000000d' | format(1) }}".to_owned(),
        "{{ '{:>1000000000}'.format(1) }}".to_owned(),
        "{{ '{:>{}}'.format(1, 1000000000) }}".to_owned(),
        "{% set n = 90000000 %}{% set ns = namespace(l=[]) %}{% for i in range(99) %}{% set ns.l = ns.l + ['x' * n] %}{% endfor %}".to_owned(),
        "{{ messages | tojson(indent='x' * 1000000) }}".to_owned(),
        "{{ [1, 2] * 90000000 | tojson }}".to_owned(),
        // Large values built by doubling.
        grow("ns.x ~ ns.x", "{{ ns.x | length }}"),
        grow("ns.x + ns.x", ""),
        grow("ns.x * 2", ""),
        grow("[ns.x, ns.x] | join", ""),
        grow("''.join([ns.x, ns.x])", ""),
        grow("ns.x.join('abc')", ""),
        grow("ns.x | replace('a', 'aa')", ""),
        grow("ns.x.replace('a', 'aa')", ""),
        grow("'%s%s' | format(ns.x, ns.x)", ""),
        grow("'{0}{0}'.format(ns.x)", ""),
        grow("ns.x | urlencode ~ ns.x", ""),
        grow("[ns.x] | map('replace', 'a', 'aa') | first", ""),
        "{{ ['a\nb'] | map('indent', 1000000000000) | list }}".to_owned(),
        grow("ns.x | tojson | tojson", ""),
        list("ns.l + ns.l", "{{ ns.l | length }}"),
        list("ns.l * 2", "{{ ns.l | list | length }}"),
        straight("{{ x }}"),
        straight("{{ x | tojson }}"),
        straight("{{ x | string }}"),
        straight("{{ x ~ '' }}"),
        straight("{{ x == [x, x][0] + [] }}"),
        straight("{{ [x, x] | sort }}"),
        straight("{{ [x, x] | unique | list }}"),
        // Captured text between tags.
        format!("{{% set t %}}{{% for a in range(9999) %}}{}{{% endfor %}}{{% endset %}}x", "word ".repeat(9999)),
    ] {
        let started = Instant::now();
        let rendered = template(&source).render(&short, true);
        assert!(rendered.is_err(), "{source:.200}");
        assert!(started.elapsed().as_secs() < 60, "{source:.200}");
    }
    let folder = tempfile::tempdir().unwrap();
    let chain = |link: &str| format!("{{{{ {}1 }}}}", link.repeat(9999));
    for source in [
        "x".repeat(2 << 20),
        // Chained operators are nested, too.
        chain("1 + "),
        chain("not "),
        chain("- "),
        format!("{{{{ x{} }}}}", ".b".repeat(9999)),
        format!("{{% if x{} %}}{{% endif %}}", " | upper".repeat(9999)),
    ] {
        std::fs::write(folder.path().join("chat_template.jinja"), source).unwrap();
        assert!(ChatTemplate::open(folder.path()).is_err());
    }
}

/// A single step may read a whole text, so that the bytes that all steps read are limited.
#[test]
fn reading_of_texts_is_bounded() {
    let short = [say("user", "x")];
    let again = |step: &str| {
        format!(
            "{{% set x = 'a' * 16000000 %}}{{% set z = 'a' * 16000000 %}}{{% for i in range(100000) %}}{{% set y = {step} %}}{{% endfor %}}"
        )
    };
    for step in ["x.count('a')", "x.startswith(x)", "x == z", "z in x", "x | length", "x.find(z)"] {
        let message = failure(&again(step), &short);
        assert!(message.contains("bytes of texts"), "{step}: {message}");
    }
    for pieces in ["('a' * 30000000).split('a') | length", "('a' * 30000000) | list | length"] {
        failure(&format!("{{{{ {pieces} }}}}"), &short);
    }
    // A conversation of a few megabytes may be read many times.
    let long = [say("user", &"word ".repeat(400_000))];
    let source = "{% for i in range(100) %}{% if 'x' in messages[0].content %}{% endif %}{% endfor %}ok";
    assert_eq!(render(source, &long), "ok");
}

/// The limits do not change results.
#[test]
fn operators_give_the_results_of_python() {
    let short = [say("user", "x")];
    for (source, expected) in [
        (
            "{{ 1 + 2 }}{{ 1.5 + 1 }}{{ 2 * 3 }}{{ 'ab' * 2 }}{{ 2 * 'ab' }}{{ 'a' + 'b' }}{{ 1 ~ 'a' }}",
            "32.56ababababab1a",
        ),
        (
            "{% set n = 2 %}{% set s = 'ab' %}{{ n + 1 }}{{ n * 1.5 }}{{ s * n }}{{ n * s }}{{ s + s }}{{ n ~ s }}{{ ([n] + [s]) | length }}",
            "33.0abababababab2ab2",
        ),
        ("{{ [1] + [2] }}{{ [1] * 2 }}", "[1, 2][1, 1]"),
        (
            "{% set n = 1 %}{{ n == 1.0 }}{{ n != 2 }}{{ n < 2 }}{{ n + 1 <= 1 }}{{ 'b' ~ n > 'a' }}{{ n >= 2 }}",
            "TrueTrueTrueFalseTrueFalse",
        ),
        (
            "{{ 'a' in 'abc' }}{{ 1 in [1] }}{{ 2 not in [1] }}{{ 'role' in messages[0] }}{{ [1] in [[1]] }}",
            "TrueTrueTrueTrueTrue",
        ),
        (
            "{{ missing ~ 'x' }}{{ 'yes' if messages == messages and 2 == 2 else 'no' }}{{ messages == 2 or 3 }}",
            "xyes3",
        ),
        ("{% set ns = namespace(a=1) %}{% set ns.a = ns.a + 1 if ns.a == 1 else 5 %}{{ ns.a }}", "2"),
        ("{% set ns = namespace(a=1) %}{% set ns.a = ns.a + 1 if ns.a == 2 else 5 %}{{ ns.a }}", "5"),
        ("{% set ns = namespace() %}{% set ns.t %}a{{ 1 }}b{% endset %}{{ ns.t }}", "a1b"),
        ("{% macro m(a, b='c') %}<{{ a + b }}>{% endmacro %}{{ m('x') }}{{ m('x', 'y') }}", "<xc><xy>"),
        (
            "{% for k, v in {'a': 1, 'b': 2}.items() %}{{ k }}{{ v }}{% if not loop.last %},{% endif %}{% endfor %}",
            "a1,b2",
        ),
        (
            "{% set o = {'a': 1} %}{{ o.keys() | join }}{{ o.values() | join }}{% for k, v in o | items %}{{ k }}{{ v }}{% endfor %}",
            "a1a1",
        ),
        (
            "{{ ' a\nb' | trim | indent(2) }}{{ ['a', 'b'] | join(', ') }}{{ '-'.join(['a', 'b']) }}{{ 'aXa' | replace('X', 'YY') }}",
            "a\n  ba, ba-baYYa",
        ),
        (
            "{{ ['a', 'b'] | map('upper') | join }}{{ [[1, 2], [3]] | map('join', '-') | join(';') }}",
            "AB1-2;3",
        ),
        (
            "{{ messages | map(attribute='content') | join }}{{ messages | selectattr('role', 'equalto', 'user') | list | length }}",
            "x1",
        ),
        (
            "{{ [3, 1, 2] | sort | join }}{{ ['b', 'a', 'b'] | unique | join }}{{ 'Ab' | upper }}{{ 'Ab' | lower }}{{ [1, 2, 3] | batch(2) | list }}",
            "123baABab[[1, 2], [3]]",
        ),
        (
            "{% for x in [1, 2] %}{% for y in [3] %}{{ x * y }}{% else %}n{% endfor %}{% endfor %}{% for x in [] %}{% else %}e{% endfor %}",
            "36e",
        ),
        ("{{ '%s is %d' | format('a', 3) }}{{ '{} {:>3}'.format('a', 3) }}", "a is 3a   3"),
    ] {
        assert_eq!(render(source, &short), expected, "{source}");
    }
}

/// Long conversations of real use stay far below the limits.
#[test]
fn long_conversations_stay_within_the_limits() {
    let messages: Vec<Value> = (0..4000)
        .map(|index| say(if index % 2 == 0 { "user" } else { "assistant" }, &"word ".repeat(100)))
        .collect();
    for source in [BRACKETS, HEADERS, THOUGHTS, MARKS] {
        assert!(render(source, &messages).len() > 4000 * 400);
    }
}

/// Template in the style of gpt-oss: channels, tools as types, one call to a message, whose reasoning is shown until an answer
/// follows.
const CHANNELS: &str = r#"{%- macro kind(schema) -%}
    {%- if schema.type == "string" and schema.enum -%}
        {{- schema.enum | map("tojson") | join(" | ") -}}
    {%- else -%}
        {{- {"integer": "number", "string": "string"}.get(schema.type, "any") -}}
    {%- endif -%}
{%- endmacro -%}
{%- macro thinking() -%}
    {%- if reasoning_effort is not defined -%}
        {%- set reasoning_effort = "medium" -%}
    {%- endif -%}
    {{- "Reasoning: " + reasoning_effort -}}
{%- endmacro -%}
<|start|>system<|message|>{{ "Year: " + strftime_now("%Y")[:2] + "; " }}{{ thinking() }}{% if tools %}; calls go to commentary{% endif %}<|end|>
{%- if messages[0].role == "system" %}
    {%- set told, turns = messages[0].content, messages[1:] %}
{%- else %}
    {%- set told, turns = "", messages %}
{%- endif %}
{%- if told or tools %}
    {{- "<|start|>developer<|message|>" + told }}
    {%- for tool in tools or [] %}
        {{- "\ntype " + tool.function.name + " = (_: {" }}
        {%- for name, schema in tool.function.parameters.properties.items() %}
            {{- name + ("" if name in tool.function.parameters.required else "?") + ": " }}{{ kind(schema) + "," }}
        {%- endfor %}
        {{- "}) => any;" }}
    {%- endfor %}
    {{- "<|end|>" }}
{%- endif %}
{%- set called = namespace(name=none) %}
{%- for turn in turns %}
    {%- if turn.role == "assistant" and "tool_calls" in turn %}
        {%- set answered = namespace(later=false) %}
        {%- for later in turns[loop.index:] if later.role == "assistant" and "tool_calls" not in later %}
            {%- set answered.later = true %}
        {%- endfor %}
        {%- if turn.content and turn.thinking %}{{ raise_exception("either content or thinking") }}{% endif %}
        {%- if turn.thinking and not answered.later %}
            {{- "<|start|>assistant<|channel|>analysis<|message|>" + turn.thinking + "<|end|>" }}
        {%- endif %}
        {%- set called.name = turn.tool_calls[0].function.name %}
        {{- "<|start|>assistant to=functions." + called.name + "<|channel|>commentary json<|message|>" }}
        {{- turn.tool_calls[0].function.arguments | tojson }}<|call|>
    {%- elif turn.role == "tool" %}
        {%- if called.name is none %}{{ raise_exception("nothing was called") }}{% endif %}
        {{- "<|start|>functions." + called.name + " to=assistant<|channel|>commentary<|message|>" + turn.content | tojson + "<|end|>" }}
    {%- else %}
        {{- "<|start|>" + turn.role + ("<|channel|>final" if turn.role == "assistant" else "") + "<|message|>" + turn.content + "<|end|>" }}
    {%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}<|start|>assistant{% endif %}"#;

#[test]
fn gpt_oss_style_template_renders_as_in_jinja2() {
    let template = template(CHANNELS);
    let tool = json!({"type": "function", "function": {"name": "weather", "parameters": {
        "type": "object",
        "properties": {"place": {"type": "string"}, "unit": {"type": "string", "enum": ["C", "F"]}},
        "required": ["place"],
    }}});
    let call = json!({"id": "1", "type": "function", "function": {"name": "weather", "arguments": {"place": "Zürich"}}});
    let called = json!({"role": "assistant", "content": "", "thinking": "I look.", "tool_calls": [call]});
    let result = json!({"role": "tool", "tool_call_id": "1", "content": "20 C"});
    let begun = [say("user", "How warm?"), called.clone(), result];
    let text = template
        .render_with(
            &begun,
            Rendering { tools: Some(&[tool]), add_generation_prompt: true, ..<_>::default() },
        )
        .unwrap();
    assert_eq!(
        text,
        "<|start|>system<|message|>Year: 20; Reasoning: medium; calls go to commentary<|end|>\
         <|start|>developer<|message|>\ntype weather = (_: {place: string,unit?: \"C\" | \"F\",}) => any;<|end|>\
         <|start|>user<|message|>How warm?<|end|>\
         <|start|>assistant<|channel|>analysis<|message|>I look.<|end|>\
         <|start|>assistant to=functions.weather<|channel|>commentary json<|message|>{\"place\": \"Zürich\"}<|call|>\
         <|start|>functions.weather to=assistant<|channel|>commentary<|message|>\"20 C\"<|end|><|start|>assistant"
    );
    // After an answer, the reasoning before it is left out.
    let text = template.render(&[&begun[..], &[say("assistant", "20 C.")]].concat(), true).unwrap();
    assert!(!text.contains("I look.") && text.contains("<|channel|>final<|message|>20 C.<|end|>"), "{text}");
    let mut both = called;
    both["content"] = "Wait.".into();
    assert_eq!(refusal(CHANNELS, &[both]), "either content or thinking");
    assert_eq!(refusal(CHANNELS, &[begun[2].clone()]), "nothing was called");
    for effort in ["low", "high"] {
        let rendering = Rendering { reasoning_effort: Some(effort), ..<_>::default() };
        let text = template.render_with(&begun[..1], rendering).unwrap();
        assert!(
            text.starts_with(&format!("<|start|>system<|message|>Year: 20; Reasoning: {effort}<|end|>")),
            "{text}"
        );
    }
}
