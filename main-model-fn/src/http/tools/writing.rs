//! Writes calls in a format, for templates that do not write calls.

use super::format::{Element, Format, Layout};
use serde_json::Value;

/// Writes `calls` (function name, arguments) in `format`. `number` is the number of the first call in the conversation.
pub(super) fn written(format: &Format, calls: &[(String, Value)], number: usize) -> String {
    let each: Vec<String> = match &format.layout {
        Layout::Sections(section) => (number..).zip(calls).map(|(number, it)| call(section.call, it, number)).collect(),
        Layout::Bare { call: elements, .. } => calls.iter().map(|one| call(elements, one, 0)).collect(),
        Layout::Harmony => calls
            .iter()
            .map(|(name, arguments)| {
                let arguments = json(arguments);
                format!("<|channel|>commentary to=functions.{name} <|constrain|>json<|message|>{arguments}<|call|>")
            })
            .collect(),
    };
    match &format.layout {
        Layout::Sections(section) => {
            let wrapped =
                |calls: &str| format!("{}{}{calls}{}", section.marker, section.before, section.after);
            match section.between {
                Some(between) => wrapped(&each.join(between)),
                None => {
                    let sections: Vec<String> = each.iter().map(|call| wrapped(call)).collect();
                    sections.join(section.next.unwrap_or_default())
                }
            }
        }
        Layout::Bare { between, .. } => each.join(between),
        Layout::Harmony => each.concat(),
    }
}

/// Returns arguments as JSON; other text stays as it is.
fn json(arguments: &Value) -> String {
    arguments.as_str().map_or_else(|| arguments.to_string(), str::to_owned)
}

fn call(elements: &[Element], (name, arguments): &(String, Value), number: usize) -> String {
    let part = |element: &Element| match element {
        Element::Text(text) => (*text).to_owned(),
        Element::Name => name.clone(),
        Element::Number => number.to_string(),
        Element::Id => format!("{number:09}"),
        Element::Arguments => json(arguments),
        Element::Object(key) => format!("{{\"name\": \"{name}\", \"{key}\": {}}}", json(arguments)),
        Element::Parameters(it) => {
            let one = |(key, value): (&String, &Value)| {
                let value = json(value);
                let before = [it.open, key, it.named, it.gap, it.value, it.padding].concat();
                [&before, &value, it.padding, it.close, it.after].concat()
            };
            match arguments.as_object() {
                Some(arguments) => arguments.iter().map(one).collect(),
                // Text that is no object, as of a call that was cut off.
                None if json(arguments).is_empty() => String::new(),
                None => one((&"arguments".to_owned(), arguments)),
            }
        }
    };
    elements.iter().map(part).collect()
}
