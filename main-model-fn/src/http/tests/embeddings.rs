//! Tests of embeddings.

use super::{BOS, TestServer, figures};
use crate::engine::request::{Event, Request};
use base64::Engine;
use base64::engine::general_purpose::STANDARD;
use serde_json::{Value, json};

const PATH: &str = "/v1/embeddings";

/// Returns the prompt's length and its last token.
fn mean(request: &Request) -> Vec<f32> {
    assert!(request.embeds && request.max_tokens == 0);
    vec![request.prompt.len() as f32, request.prompt.last().copied().unwrap_or_default() as f32 + 0.5]
}

async fn embed(server: &TestServer, body: Value) -> (super::Reply, Vec<Request>) {
    server.post_with_script(PATH, body, |request| vec![Event::Embedding(mean(request))]).await
}

#[tokio::test]
async fn embeddings_are_in_the_order_of_the_inputs() {
    let server = TestServer::new();
    for (input, expected) in [
        (json!("ab"), vec![vec![3.0, 98.5]]),
        (json!(["ab", "c"]), vec![vec![3.0, 98.5], vec![2.0, 99.5]]),
        (json!([7, 8]), vec![vec![2.0, 8.5]]),
        (json!([[7], [8, 9, 1]]), vec![vec![1.0, 7.5], vec![3.0, 1.5]]),
    ] {
        let (reply, requests) = embed(&server, json!({"model": "org/tiny", "input": input})).await;
        let answer = reply.ok();
        assert_eq!((&answer["object"], &answer["model"]), (&json!("list"), &json!("org/tiny")));
        let tokens: usize = requests.iter().map(|request| request.prompt.len()).sum();
        assert_eq!(answer["usage"], json!({"prompt_tokens": tokens, "total_tokens": tokens}));
        let data = answer["data"].as_array().unwrap();
        assert_eq!(data.len(), expected.len());
        for (index, (one, expected)) in data.iter().zip(&expected).enumerate() {
            assert_eq!(one, &json!({"object": "embedding", "index": index, "embedding": expected}));
        }
        let body = json!({"input": input, "encoding_format": "base64"});
        let answer = embed(&server, body).await.0.ok();
        for (one, expected) in answer["data"].as_array().unwrap().iter().zip(&expected) {
            let bytes = STANDARD.decode(one["embedding"].as_str().unwrap()).unwrap();
            let floats: Vec<f32> =
                bytes.chunks_exact(4).map(|bytes| f32::from_le_bytes(bytes.try_into().unwrap())).collect();
            assert_eq!(&floats, expected);
        }
    }
    let (_, requests) = embed(&server, json!({"input": "a", "add_special_tokens": false})).await;
    assert!(!requests[0].prompt.contains(&BOS));
}

#[tokio::test]
async fn invalid_inputs_are_refused_by_name() {
    let server = TestServer::new();
    for (body, param) in [
        (json!({}), "input"),
        (json!({"input": []}), "input"),
        (json!({"input": 1}), "input"),
        (json!({"input": ["a", 1]}), "input"),
        (json!({"input": [999]}), "input"),
        (json!({"input": [[1], [999]]}), "input[1]"),
        (json!({"input": ["a", "b".repeat(101)]}), "input[1]"),
        (json!({"input": vec!["a"; 6]}), "input"),
        (json!({"input": "a", "encoding_format": "hex"}), "encoding_format"),
        (json!({"input": "a", "dimensions": 8}), "dimensions"),
    ] {
        server.post(PATH, body).await.refuses(param);
    }
    server.post(PATH, json!({"model": "gpt-5", "input": "a"})).await.error(404);
    let without = TestServer::build(None, super::Engine::limits(), |_| ());
    without.post(PATH, json!({"input": ["a", "b"]})).await.refuses("input[0]");
    let endless = |_: &Request| vec![Event::Embedding(vec![f32::NAN])];
    let reply = server.post_with_script(PATH, json!({"input": "a"}), endless).await.0;
    reply.error(500);
    let failing = |request: &Request| vec![super::failure(), Event::Done(figures(request))];
    server.post_with_script(PATH, json!({"input": "a"}), failing).await.0.error(503);
}
