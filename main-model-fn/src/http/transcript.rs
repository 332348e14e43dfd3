//! Converts the items and blocks of other APIs to messages of a chat.

use serde_json::{Map, Value, json};

/// Messages so far, with an incomplete message of the assistant.
#[derive(Debug, Default)]
pub(super) struct Transcript {
    /// System texts before all other messages; templates accept one system message.
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

    /// Adds the result of the call `id`.
    pub(super) fn tool_result(&mut self, id: String, text: String) {
        self.push(json!({"role": "tool", "tool_call_id": id, "content": text}));
    }

    /// Adds a thought of the model; a message begins with it.
    pub(super) fn reasoning(&mut self, text: String) {
        self.begin_unless(|assistant| assistant.text.is_none() && assistant.calls.is_empty())
            .reasoning
            .push(text);
    }

    /// Adds text of the model, before its calls.
    pub(super) fn assistant_text(&mut self, text: String) {
        self.begin_unless(|assistant| assistant.text.is_none() && assistant.calls.is_empty()).text =
            Some(text);
    }

    /// Adds a call of the model.
    pub(super) fn tool_call(&mut self, id: String, name: String, arguments: String) {
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

    /// Returns the assistant's message if `goes_on` accepts it, or else a new one.
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
        // Thoughts without text or calls form no message.
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
        let mut transcript = Transcript::default();
        transcript.system("a".to_owned());
        transcript.system("b".to_owned());
        transcript.user("u".to_owned());
        transcript.reasoning("r1".to_owned());
        transcript.reasoning("r2".to_owned());
        transcript.assistant_text("s".to_owned());
        transcript.tool_call("1".to_owned(), "f".to_owned(), "{}".to_owned());
        transcript.tool_call("2".to_owned(), "g".to_owned(), "{}".to_owned());
        transcript.tool_result("1".to_owned(), "one".to_owned());
        transcript.system("late".to_owned());
        transcript.assistant_text("x".to_owned());
        transcript.assistant_text("y".to_owned());
        transcript.reasoning("led to nothing".to_owned());
        let call = |id: &str, name: &str| json!({"id": id, "type": "function", "function": {"name": name, "arguments": "{}"}});
        assert_eq!(
            transcript.finish(),
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
