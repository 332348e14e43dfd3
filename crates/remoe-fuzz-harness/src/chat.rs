//! Target: bodies of `/v1/chat/completions`.

use crate::bodies;

pub fn run(body: &[u8]) {
    bodies::run(true, body);
}

pub fn seeds() -> Vec<Vec<u8>> {
    bodies::seeds(&[
        r#""messages":[{"role":"user","content":"hi"}]"#,
        r#""messages":[{"role":"developer","content":[{"type":"text","text":"b"}]},{"role":"user","content":"é 😀\n"}]"#,
        r#""messages":[{"role":"user","content":"a","name":"n"},{"role":"assistant","tool_calls":[{"id":"i","function":{"name":"f","arguments":"{\"x\":[1]}"}}]},{"role":"tool","tool_call_id":"i","content":"c"}]"#,
        r#""messages":[{"role":"user","content":[{"type":"image_url","image_url":{}}],"audio":null,"function_call":""}]"#,
    ])
}
