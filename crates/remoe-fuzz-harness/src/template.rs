//! Target: chat templates. Reads `tokenizer_config.json`, `special_tokens_map.json` and `chat_template.jinja`, compiles
//! the template and renders it.
//!
//! Input: the three files and a conversation as JSON, separated by zero bytes. An empty file is treated as missing. A
//! template of one byte selects a trusted template.

use crate::scratch::ScratchFolder;
use crate::{check_error, fixtures, memory, sections};
use remoe_model::text::ChatTemplate;
use serde_json::{Value, json};
use std::cell::OnceCell;

/// Memory limit per byte of JSON or of a template. A rendering writes at most 32 MiB.
const BYTES_PER_INPUT_BYTE: usize = 1024;
const BASE_BYTES: usize = 1 << 20;
const RENDER_BYTES: usize = 512 << 20;

/// Operators, filters and functions that can multiply a text in one step. A rendering bounds their memory, but by more
/// than the limit here. Therefore only trusted templates with them are rendered.
const MULTIPLIERS: [&str; 9] = ["+", "~", "*", "format", "indent", "join", "replace", "range", "list"];

/// Reads the templates of fixture models, as pairs of `tokenizer_config.json` and `chat_template.jinja`.
fn trusted_templates() -> Vec<(Vec<u8>, Vec<u8>)> {
    let folders = [
        "tests/fixtures/tokenizers/tok-bytelevel",
        "tests/fixtures/tokenizers/tok-llama",
        "tests/fixtures/tokenizers/tok-unigram",
        "tests/fixtures/mixtral-text",
        "demo/model",
    ];
    let read = |folder: &str, name: &str| fixtures::read(fixtures::root().join(folder).join(name));
    folders.map(|folder| (read(folder, "tokenizer_config.json"), read(folder, "chat_template.jinja"))).into()
}

thread_local! {
    static SCRATCH: OnceCell<ScratchFolder> = const { OnceCell::new() };
    static TRUSTED_TEMPLATES: OnceCell<Vec<ChatTemplate>> = const { OnceCell::new() };
}

pub fn run(data: &[u8]) {
    let ([config, map, jinja, messages], _) = sections::split(data);
    let messages = serde_json::from_slice::<Vec<Value>>(messages).unwrap_or_else(|_| {
        vec![json!({"role": "user", "content": "hi"}), json!({"role": "assistant", "content": "é"})]
    });
    if let [number] = jinja {
        return TRUSTED_TEMPLATES.with(|cell| {
            let templates = cell.get_or_init(open_trusted_templates);
            let template = &templates[usize::from(*number) % templates.len()];
            render(template, &messages, BASE_BYTES + BYTES_PER_INPUT_BYTE * data.len());
        });
    }
    let files =
        [("tokenizer_config.json", config), ("special_tokens_map.json", map), ("chat_template.jinja", jinja)];
    let files: Vec<(&str, &[u8], u64)> = files
        .into_iter()
        .filter(|(_, content)| !content.is_empty())
        .map(|(name, content)| (name, content, content.len() as u64))
        .collect();
    SCRATCH.with(|cell| {
        let scratch = cell.get_or_init(ScratchFolder::new);
        scratch.fill(&files);
        match memory::with_limit(BASE_BYTES + BYTES_PER_INPUT_BYTE * data.len(), || {
            ChatTemplate::open(scratch.folder())
        }) {
            Err(error) => check_error(&error.to_string()),
            Ok(None) => (),
            Ok(Some(template)) => {
                // In JSON, a `\u` escape could hide a multiplier.
                let text = [config, jinja].map(|part| String::from_utf8_lossy(part));
                let multiplies =
                    |text: &str| text.contains("\\u") || MULTIPLIERS.iter().any(|word| text.contains(word));
                if !text.iter().any(|text| multiplies(text)) {
                    render(&template, &messages, RENDER_BYTES);
                }
            }
        }
    });
}

fn render(template: &ChatTemplate, messages: &[Value], limit: usize) {
    for generation in [false, true] {
        if let Err(error) = memory::with_limit(limit, || template.render(messages, generation)) {
            check_error(&error.to_string());
        }
    }
}

fn open_trusted_templates() -> Vec<ChatTemplate> {
    let scratch = ScratchFolder::new();
    let open = |(config, jinja): (Vec<u8>, Vec<u8>)| {
        let files = [("tokenizer_config.json", config), ("chat_template.jinja", jinja)];
        let files: Vec<(&str, &[u8], u64)> = files
            .iter()
            .filter(|(_, content)| !content.is_empty())
            .map(|(name, content)| (*name, content.as_slice(), content.len() as u64))
            .collect();
        scratch.fill(&files);
        ChatTemplate::open(scratch.folder()).expect("a fixture is right").expect("and has a template")
    };
    trusted_templates().into_iter().map(open).collect()
}

pub fn seeds() -> Vec<Vec<u8>> {
    let mut seeds = Vec::new();
    let messages = br#"[{"role":"system","content":"s"},{"role":"user","content":"hi "},{"role":"assistant","content":"a","tool_calls":[{"function":{"name":"f","arguments":{"x":[1,2.5,null]}}}]}]"#;
    for (number, (config, jinja)) in (0..).zip(trusted_templates()) {
        seeds.push(sections::join(&[&config, b"", &jinja, messages]));
        seeds.push(sections::join(&[b"", b"", &jinja, b""]));
        // Printable digits, because a zero byte separates sections.
        seeds.push(sections::join(&[b"", b"", &[b'0' + number], messages]));
        seeds.push(sections::join(&[
            b"",
            b"",
            &[b'0' + number],
            br#"[{"role":"user","content":"a\u00e9"},{"role":"assistant","content":null}]"#,
        ]));
    }
    let map = br#"{"bos_token":{"content":"<s>"},"eos_token":"</s>"}"#;
    let config = br#"{"chat_template":[{"name":"default","template":"{{ bos_token }}{{ messages[0].content }}"}],"pad_token":null}"#;
    seeds.push(sections::join(&[config, map, b"", messages]));
    for jinja in [
        "{% for m in messages %}{% if loop.index0 > 3 %}{% break %}{% endif %}{{ m | tojson(indent=2) }}{% endfor %}",
        "{%- macro f(x, y=1) -%}{{ x.strip() ~ y }}{%- endmacro -%}{{ f(messages[0]['content']) }}{% generation %}x{% endgeneration %}",
        "{% set ns = namespace(n=0) %}{% for m in messages if m.role == 'user' %}{% set ns.n = ns.n + 1 %}{% continue %}{% endfor %}{{ ns.n }}",
        "{{ raise_exception('no: ' + messages[0].role) }}",
        "{% for m in messages %}{{ loop.index }}{{ m.role | upper }}: {{ m['content'].strip() | trim }}{% if not loop.last %}, {% endif %}{% endfor %}",
        "{% macro f(x) %}{{ x | tojson(indent=2) }}{% endmacro %}{% set y %}{{ f(messages) }}{% endset %}{{ y | length }}{{ messages[0].get('name') or 'n' }}",
        "{% if messages[0].role not in ['system', 'user'] or 'x' is defined %}{{ messages | selectattr('role', 'equalto', 'user') | first }}{% endif %}",
        "{{ strftime_now('%d %b %Y') }}{{ messages | length }}{{ messages[-1:] | map(attribute='content') | join(',') }}",
        "{% if messages[0].content is string and tools is none %}{{ 'a'.upper().split('x')[0] | trim }}{% endif %}{# c #}",
        "{% for i in range(3) %}{{ loop.first }}{{ '%s' | format(i) }}{% else %}e{% endfor %}{{ {'a': [1, 2]} | tojson(separators=(',', ':'), sort_keys=true) }}",
        "{% filter upper %}{% set x %}a{% endset %}{{ x | replace('a', 'bb') | default('c', true) }}{% endfilter %}",
    ] {
        seeds.push(sections::join(&[b"", b"", jinja.as_bytes(), messages]));
    }
    seeds
}
