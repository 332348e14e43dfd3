//! Target of chat and completion bodies: runs all checks between the HTTP route and the engine's queue, with the
//! tokenizer and chat template of a fixture.

use crate::{check_error, fixtures, memory};
use main_model_fn::PageNeeds;
use main_model_fn::backend::PAGE_POSITIONS;
use main_model_fn::engine::RequestLimits;
use main_model_fn::http_fuzzing::{Checked, checks};
use main_model_fn::model_text::ModelText;
use remoe_model::Checkpoint;
use std::cell::OnceCell;

/// Memory limit per byte of a body. The tokenizer keeps several allocations per character.
const BYTES_PER_INPUT_BYTE: usize = 1024;
const BASE_BYTES: usize = 1 << 20;

const LIMITS: RequestLimits = RequestLimits {
    vocab_size: 460,
    context_length: 128,
    cache_pages: 10,
    page_needs: PageNeeds { whole: 1, windowed: 0, window: 0 },
    prefill_rows: 2048,
    max_choices: 4,
    max_requests: 8,
    queue_deadline: None,
};

/// Checks the body of a chat (`true`) or a completion (`false`).
type Check = Box<dyn Fn(bool, &[u8]) -> Checked>;

thread_local! {
    static CHECKS: OnceCell<Check> = const { OnceCell::new() };
}

pub(crate) fn run(is_chat: bool, body: &[u8]) {
    CHECKS.with(|cell| {
        let check = cell.get_or_init(|| {
            let checkpoint = Checkpoint::open(fixtures::root().join("tests/fixtures/mixtral-text"));
            let text = ModelText::open(&checkpoint.expect("a fixture is right")).expect("its texts, too");
            Box::new(checks(text, LIMITS))
        });
        let checked =
            memory::with_limit(BASE_BYTES + BYTES_PER_INPUT_BYTE * body.len(), || check(is_chat, body));
        match checked {
            Err(error) => {
                check_error(&error.message);
                check_error(tonic::Status::from(error.clone()).message());
                assert!(error.field.is_none_or(|field| field.len() <= 256), "the name of a field is short");
                assert!(
                    error.code.http_status() < 500,
                    "no body is a fault of the server: {}",
                    error.message
                );
            }
            Ok(requests) => {
                assert!(!requests.is_empty() && requests.len() <= LIMITS.max_requests);
                assert!(!is_chat || requests.len() == 1);
                for request in requests {
                    check_request(&request, is_chat);
                }
            }
        }
    });
}

/// Asserts the properties of a request that the engine relies on.
fn check_request(request: &main_model_fn::engine::request::Request, is_chat: bool) {
    let is_token = |id: &u32| (*id as usize) < LIMITS.vocab_size;
    assert!(!request.prompt.is_empty() && request.prompt.iter().all(is_token));
    assert!((1..=LIMITS.max_choices).contains(&request.choices));
    let length = request.prompt.len() + request.max_tokens;
    assert!(
        length <= LIMITS.context_length && length * request.choices <= LIMITS.cache_pages * PAGE_POSITIONS
    );
    assert!(!is_chat || request.max_tokens > 0);
    assert!(request.stop.min_tokens <= request.max_tokens);
    assert!(request.stop.strings.len() <= 32 && request.stop.token_ids.len() <= 1024);
    assert!(request.stop.strings.iter().all(|stop| (1..=1024).contains(&stop.len())));
    assert!(request.stop.token_ids.iter().all(is_token));
    assert!(request.logprobs.is_none_or(|count| count <= 20));
    assert!(request.prompt_logprobs.is_none_or(|count| count <= 20 && !is_chat));
    let sampling = &request.sampling;
    assert!((0.0..=2.0).contains(&sampling.temperature) && (0.0..=1.0).contains(&sampling.top_p));
    assert!((0.0..=1.0).contains(&sampling.min_p) && (0.0..=100.0).contains(&sampling.repetition_penalty));
    assert!(sampling.repetition_penalty > 0.0);
    assert!((-2.0..=2.0).contains(&sampling.presence_penalty));
    assert!((-2.0..=2.0).contains(&sampling.frequency_penalty));
    assert!(sampling.logit_bias.iter().all(|(id, bias)| is_token(id) && (-100.0..=100.0).contains(bias)));
}

/// Builds bodies with all parameters. `prompts` contains the part that differs between the routes.
pub(crate) fn seeds(prompts: &[&str]) -> Vec<Vec<u8>> {
    let parameters = [
        "",
        r#","model":"m","max_tokens":5,"n":2,"best_of":2,"temperature":0.5,"top_p":0.9,"top_k":4,"min_p":0.1,"seed":-3"#,
        r#","presence_penalty":1,"frequency_penalty":-1.5,"repetition_penalty":1.1,"logit_bias":{"3":-100,"4":1.5}"#,
        r#","stop":["a","bc"],"stop_token_ids":[2,3],"min_tokens":1,"ignore_eos":true,"max_completion_tokens":3"#,
        r#","stream":true,"stream_options":{"include_usage":true},"return_token_ids":true,"include_figures":true"#,
        r#","tools":[],"tool_choice":"none","response_format":{"type":"text"},"modalities":["text"],"suffix":null"#,
        r#","logprobs":true,"top_logprobs":3,"add_generation_prompt":false,"add_special_tokens":true"#,
        r#","logprobs":4,"echo":true,"max_tokens":0,"stop":"x","user":"u","seed":18446744073709551615"#,
        r#","temperature":NaN,"top_p":-1,"functions":[{}],"guided_json":{"a":[]},"chat_template":"x""#,
    ];
    let mut seeds = Vec::new();
    for prompt in prompts {
        for suffix in parameters {
            seeds.push(format!("{{{prompt}{suffix}}}").into_bytes());
        }
    }
    let long_text = fixtures::long_text();
    for field in
        ["model", "max_tokens", "seed", "logprobs", "temperature", "response_format", "stop_token_ids"]
    {
        seeds.push(format!(r#"{{{},"{field}":"{long_text}"}}"#, prompts[0]).into_bytes());
    }
    seeds.push(format!(r#"{{{},"logit_bias":{{"{long_text}":1}}}}"#, prompts[0]).into_bytes());
    seeds.push(format!(r#"{{"messages":[{{"role":"{long_text}","content":"a"}}]}}"#).into_bytes());
    seeds.push(
        format!(r#"{{"messages":[{{"role":"user","content":[{{"type":"{long_text}"}}]}}]}}"#).into_bytes(),
    );
    seeds.push(format!(r#"{{"prompt":"{long_text}"}}"#).into_bytes());
    seeds
}
