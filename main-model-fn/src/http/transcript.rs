//! Messages of a chat, made of what other APIs write in items and blocks.

use serde_json::{Map, Value, json};

/// Messages so far, and the assistant's that is not complete.
#[derive(Debug, Default)]
pub(super) struct Transcript {
    /// Texts of the system before anything else: templates take one message of them.
    system: Vec<String>,
    messages: Vec<Value>,
    assistant: Option<Assistant>,
}

#[derive(Debug, Default)]
struct Assistant {
    reasoning: Vec<String>,
    text: Option<String>,
    calls: Vec<Value>,
}

impl Transcript {
    pub(super) fn system(&mut self, text: String) {
        if self.messages.is_empty() && self.assistant.is_none() {
            self.system.push(text);
            return;
        }
        self.push(json!({"role": "system", "content": text}));
    }

    pub(super) fn user(&mut self, text: String) {
        self.push(json!({"role": "user", "content": text}));
    }

    /// Adds the result of a function for the call `id`.
    pub(super) fn returned(&mut self, id: String, text: String) {
        self.push(json!({"role": "tool", "tool_call_id": id, "content": text}));
    }

    /// Adds what the model says to itself; a message begins with it.
    pub(super) fn reasoning(&mut self, text: String) {
        self.begin_unless(|assistant| assistant.text.is_none() && assistant.calls.is_empty())
            .reasoning
            .push(text);
    }

    /// Adds what the model says, before its calls.
    pub(super) fn said(&mut self, text: String) {
        self.begin_unless(|assistant| assistant.text.is_none() && assistant.calls.is_empty()).text =
            Some(text);
    }

    /// Adds a call of the model.
    pub(super) fn called(&mut self, id: String, name: String, arguments: String) {
        let function = json!({"name": name, "arguments": arguments});
        self.begin_unless(|_| true).calls.push(json!({"id": id, "type": "function", "function": function}));
    }

    /// Returns the messages.
    pub(super) fn finish(mut self) -> Vec<Value> {
        self.complete();
        let system =
            (!self.system.is_empty()).then(|| json!({"role": "system", "content": self.system.join("\n\n")}));
        system.into_iter().chain(self.messages).collect()
    }

    /// The assistant's message, if `goes_on` with it, else a new one.
    fn begin_unless(&mut self, goes_on: impl Fn(&Assistant) -> bool) -> &mut Assistant {
        if self.assistant.as_ref().is_some_and(|assistant| !goes_on(assistant)) {
            self.complete();
        }
        self.assistant.get_or_insert_default()
    }

    fn push(&mut self, message: Value) {
        self.complete();
        self.messages.push(message);
    }

    fn complete(&mut self) {
        let Some(Assistant { reasoning, text, calls }) = self.assistant.take() else { return };
        // Reasoning that led to nothing is no message.
        if text.is_none() && calls.is_empty() {
            return;
        }
        let mut message = Map::new();
        message.insert("role".to_owned(), "assistant".into());
        message.insert("content".to_owned(), text.map_or(Value::Null, Value::String));
        if !reasoning.is_empty() {
            message.insert("reasoning_content".to_owned(), reasoning.join("\n").into());
        }
        if !calls.is_empty() {
            message.insert("tool_calls".to_owned(), calls.into());
        }
        self.messages.push(message.into());
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn assistant_items_become_one_message_each_turn() {
        let mut turns = Transcript::default();
        turns.system("a".to_owned());
        turns.system("b".to_owned());
        turns.user("u".to_owned());
        turns.reasoning("r1".to_owned());
        turns.reasoning("r2".to_owned());
        turns.said("s".to_owned());
        turns.called("1".to_owned(), "f".to_owned(), "{}".to_owned());
        turns.called("2".to_owned(), "g".to_owned(), "{}".to_owned());
        turns.returned("1".to_owned(), "one".to_owned());
        turns.system("late".to_owned());
        turns.said("x".to_owned());
        turns.said("y".to_owned());
        turns.reasoning("led to nothing".to_owned());
        let call = |id: &str, name: &str| json!({"id": id, "type": "function", "function": {"name": name, "arguments": "{}"}});
        assert_eq!(
            turns.finish(),
            [
                json!({"role": "system", "content": "a\n\nb"}),
                json!({"role": "user", "content": "u"}),
                json!({"role": "assistant", "content": "s", "reasoning_content": "r1\nr2", "tool_calls": [call("1", "f"), call("2", "g")]}),
                json!({"role": "tool", "tool_call_id": "1", "content": "one"}),
                json!({"role": "system", "content": "late"}),
                json!({"role": "assistant", "content": "x"}),
                json!({"role": "assistant", "content": "y"}),
            ]
        );
    }
}
