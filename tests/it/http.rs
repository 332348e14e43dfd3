//! HTTP interface with a real engine: the effect of each parameter on the tokens, the response of every route, and
//! invalid requests.

use remoe_test_support::binaries::workspace;
use remoe_test_support::deadline::LONG;
use remoe_test_support::fixture::ModelFixture;
use remoe_test_support::function::{MainFunction, StartOptions};
use remoe_test_support::main_http::MainHttp;
use remoe_test_support::metrics::MetricsPage;
use remoe_test_support::process::Process;
use remoe_test_support::raw::{Connection, RawResponse, ask, get, post};
use serde_json::{Map, Value, json};
use std::collections::{BTreeMap, BTreeSet};
use std::net::SocketAddr;
use std::process::Command;

const COMPLETIONS: &str = "/v1/completions";
const CHAT: &str = "/v1/chat/completions";
const PROMPT: &str = "Once upon a time";

/// Server and minimal completion request: greedy, of a fixed length, with token ids.
struct HttpClient {
    address: SocketAddr,
}

impl HttpClient {
    async fn send(&self, path: &str, body: &Value) -> RawResponse {
        ask(self.address, post(path, &body.to_string())).await
    }

    fn body(extra: &Value) -> Value {
        merged(
            json!({"prompt": PROMPT, "max_tokens": 12, "temperature": 0, "ignore_eos": true, "return_token_ids": true}),
            extra,
        )
    }

    /// Returns the choices of a completion and checks that a stream gives the same.
    async fn choices(&self, extra: Value) -> Vec<CollectedChoice> {
        let body = Self::body(&extra);
        let whole = CollectedChoice::all(&[self.send(COMPLETIONS, &body).await.ok()]);
        let stream = merged(body, &json!({"stream": true}));
        let streamed = CollectedChoice::all(&self.send(COMPLETIONS, &stream).await.events());
        assert_eq!(streamed, whole, "streamed: {extra}");
        whole
    }

    async fn choice(&self, extra: Value) -> CollectedChoice {
        let mut choices = self.choices(extra).await;
        assert_eq!(choices.len(), 1);
        choices.remove(0)
    }

    async fn refuses(&self, path: &str, body: &Value, param: &str) {
        self.send(path, body).await.refuses(param);
    }
}

fn merged(mut body: Value, extra: &Value) -> Value {
    body.as_object_mut().unwrap().extend(extra.as_object().unwrap().clone());
    body
}

/// Choice, assembled from one response or from the chunks of a stream.
#[derive(Debug, Clone, Default, PartialEq)]
struct CollectedChoice {
    text: String,
    ids: Vec<u32>,
    finish: String,
    /// Log-probabilities in the form of completions: names, log-probabilities and alternatives.
    tokens: Vec<String>,
    logprobs: Vec<Option<f64>>,
    top: Vec<Map<String, Value>>,
    offsets: Vec<u64>,
}

impl CollectedChoice {
    fn all(parts: &[Value]) -> Vec<Self> {
        let mut choices = BTreeMap::<u64, Self>::new();
        for part in parts.iter().flat_map(|part| part["choices"].as_array().unwrap()) {
            let choice = choices.entry(part["index"].as_u64().unwrap()).or_default();
            assert_eq!(choice.finish, "", "nothing follows a choice's end: {part}");
            for text in [&part["text"], &part["message"]["content"], &part["delta"]["content"]] {
                choice.text += text.as_str().unwrap_or_default();
            }
            choice.finish += part["finish_reason"].as_str().unwrap_or_default();
            let list = |value: &Value| value.as_array().cloned().unwrap_or_default();
            choice.ids.extend(list(&part["token_ids"]).iter().map(|id| id.as_u64().unwrap() as u32));
            let logprobs = &part["logprobs"];
            choice
                .tokens
                .extend(list(&logprobs["tokens"]).iter().map(|name| name.as_str().unwrap().to_owned()));
            choice.logprobs.extend(list(&logprobs["token_logprobs"]).iter().map(Value::as_f64));
            let top = list(&logprobs["top_logprobs"]);
            choice.top.extend(top.iter().map(|top| top.as_object().cloned().unwrap_or_default()));
            choice.offsets.extend(list(&logprobs["text_offset"]).iter().map(|at| at.as_u64().unwrap()));
        }
        choices.into_values().collect()
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn loading_and_ready() {
    let server = MainHttp::unplaced(&ModelFixture::demo().folder, &[], &[]).await;
    let client = HttpClient { address: server.address };
    let loading = ask(server.address, get("/health")).await;
    let error = loading.error(503);
    assert_eq!(error["code"], "service_unavailable");
    assert_eq!(error["param"], Value::Null);
    assert!(!loading.head.header("retry-after").is_empty());
    for path in [COMPLETIONS, CHAT] {
        client.send(path, &json!({"prompt": "a", "messages": []})).await.error(503);
    }
    // Routes that need no experts respond.
    ask(server.address, get("/v1/models")).await.ok();
    assert_eq!(client.send("/tokenize", &json!({"prompt": PROMPT})).await.ok()["max_model_len"], 1024);
    server.place().await;
    assert_eq!(ask(server.address, get("/health")).await.ok(), json!({"status": "ok"}));
    assert_eq!(client.choice(json!({})).await.ids.len(), 12);
}

/// `/metrics` needs no key and returns only metrics.
#[tokio::test(flavor = "multi_thread")]
async fn metrics_have_an_address_of_their_own_where_one_is_given() {
    let options = StartOptions::default().with("--metrics-listen", "127.0.0.1:0").with("--api-key", "secret");
    let main = MainFunction::start(&ModelFixture::demo().folder, options).await;
    main.control.route(&[], &[]).await;
    let address = main.announcement.metrics.unwrap();
    assert_ne!(address, main.http());
    assert_eq!(MetricsPage::read(address).await.value("remoe_routing_generation"), 1);
    for path in ["/", "/health", "/v1/models"] {
        assert_eq!(ask(address, get(path)).await.head.status, 404, "{path}");
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn names_keys_origins_and_limits() {
    let arguments = [
        "--served-model-name",
        "org/demo",
        "--api-key",
        "secret",
        "--cors-origins",
        "https://a.example,https://b.example",
        "--body-limit",
        "20000",
    ];
    let server = MainHttp::start(&ModelFixture::demo().folder, &arguments, &[]).await;
    let ask = async |head: &str, headers: &str, body: &str| {
        let length = body.len();
        let request =
            format!("{head} HTTP/1.1\r\nHost: x\r\nContent-Length: {length}\r\n{headers}\r\n{body}");
        ask(server.address, request).await
    };
    let key = "Authorization: Bearer secret\r\n";
    for head in [
        "POST /v1/chat/completions",
        "POST /v1/completions",
        "GET /v1/models",
        "GET /v1/models/org/demo",
        "GET /metrics",
        "POST /tokenize",
        "POST /detokenize",
        "POST /v1/embeddings",
        "GET /version",
        "GET /nowhere",
        "OPTIONS /v1/models",
    ] {
        for headers in ["", "Authorization: Bearer wrong\r\n", "Authorization: Basic secret\r\n"] {
            let refused = ask(head, headers, "").await;
            let error = refused.error(401);
            assert_eq!(
                (&error["code"], &error["type"]),
                (&json!("invalid_api_key"), &json!("authentication_error"))
            );
            assert_eq!(refused.head.header("www-authenticate"), "Bearer");
        }
        assert_ne!(ask(head, key, "").await.head.status, 401, "{head}");
    }
    ask("GET /health", "", "").await.ok();
    // Only the model's name is accepted.
    let models = ask("GET /v1/models", key, "").await.ok();
    assert_eq!((&models["object"], &models["data"][0]["id"]), (&json!("list"), &json!("org/demo")));
    assert_eq!(ask("GET /v1/models/org%2Fdemo", key, "").await.ok(), models["data"][0]);
    for path in [COMPLETIONS, CHAT, "/tokenize"] {
        let error =
            ask(&format!("POST {path}"), key, r#"{"model": "model", "prompt": "a"}"#).await.error(404);
        assert_eq!((&error["code"], &error["param"]), (&json!("model_not_found"), &json!("model")));
    }
    let answer =
        ask("POST /v1/completions", key, r#"{"model": "org/demo", "prompt": "a", "max_tokens": 1}"#).await;
    assert_eq!(answer.ok()["model"], "org/demo");
    // Only browsers of the configured origins are allowed.
    let origin = |name: &str| format!("{key}Origin: https://{name}.example\r\n");
    for (name, allowed) in [("a", "https://a.example"), ("b", "https://b.example"), ("c", "")] {
        let answer = ask("GET /version", &origin(name), "").await;
        assert_eq!(answer.head.header("access-control-allow-origin"), allowed);
        let asked = format!("Origin: https://{name}.example\r\nAccess-Control-Request-Method: POST\r\n");
        let preflight = ask("OPTIONS /v1/completions", &asked, "").await;
        assert_eq!(preflight.head.status, if allowed.is_empty() { 401 } else { 204 });
        assert_eq!(preflight.head.header("access-control-allow-origin"), allowed);
    }
    // Bodies at the size limit.
    let padded = |length: usize| {
        let body = r#"{"prompt": "a", "max_tokens": 1, "user": ""}"#;
        body.replace("\"\"}", &format!("\"{}\"}}", "x".repeat(length - body.len())))
    };
    ask("POST /v1/completions", key, &padded(20000)).await.ok();
    let error = ask("POST /v1/completions", key, &padded(20001)).await.error(413);
    assert_eq!(error["code"], "request_too_large");
    // Responses have the request's id.
    let answer = ask("GET /health", "X-Request-Id: mine-1\r\n", "").await;
    assert_eq!(answer.head.header("x-request-id"), "mine-1");
    assert_eq!(ask("GET /nowhere", key, "").await.head.header("x-request-id").len(), 32);

    let mut command = Command::new("python3");
    command.arg(workspace().join("tests/python/openai_client.py"));
    command.args([&format!("http://{}", server.address), "org/demo", "secret"]);
    let mut process = Process::start("openai_client.py", command, |line| println!("{line}"));
    assert_eq!(process.end(LONG).await.code(), Some(0), "{}", process.log().join("\n"));
}

#[tokio::test(flavor = "multi_thread")]
async fn parameters() {
    let server = MainHttp::start(&ModelFixture::demo().folder, &["--max-batch", "16"], &[]).await;
    let client = HttpClient { address: server.address };
    let greedy = client.choice(json!({})).await;
    assert_eq!((greedy.ids.len(), greedy.finish.as_str()), (12, "length"));
    prompts(&client, &greedy).await;
    chats(&client).await;
    streams(&client).await;
    ends(&client, &greedy).await;
    draws(&client, &greedy).await;
    scores(&client, &greedy).await;
    characters(&client).await;
    refusals(&client).await;
}

/// Prompts as text, as ids and as lists of both; echo; the tokenize route.
async fn prompts(client: &HttpClient, greedy: &CollectedChoice) {
    let tokenized = client.send("/tokenize", &json!({"prompt": PROMPT})).await.ok();
    let ids = &tokenized["tokens"];
    assert_eq!(tokenized["count"], ids.as_array().unwrap().len());
    assert_eq!(client.choice(json!({ "prompt": ids })).await, *greedy);
    let plain = client.send("/tokenize", &json!({"prompt": PROMPT, "add_special_tokens": false})).await.ok();
    let back = client.send("/detokenize", &json!({"tokens": plain["tokens"]})).await.ok();
    assert_eq!(back["prompt"], PROMPT);
    client.send("/detokenize", &json!({"tokens": vec![1; 1024]})).await.ok();
    client.send("/detokenize", &json!({"tokens": vec![1; 1025]})).await.refuses("tokens");
    let other = client.choice(json!({"prompt": "The king said"})).await;
    assert_ne!(other.ids, greedy.ids);
    let both = [greedy.clone(), other.clone()];
    assert_eq!(client.choices(json!({"prompt": [PROMPT, "The king said"]})).await, both);
    let more = client.send("/tokenize", &json!({"prompt": "The king said"})).await.ok();
    assert_eq!(client.choices(json!({"prompt": [ids, more["tokens"]]})).await, both);
    let several = client.choices(json!({"prompt": [PROMPT, "The king said"], "n": 2})).await;
    assert_eq!(several, [&both[0], &both[0], &both[1], &both[1]].map(Clone::clone));
    let echoed = client.choices(json!({"prompt": [PROMPT, "The king said"], "echo": true})).await;
    assert_eq!(echoed[0].text, format!("{PROMPT}{}", greedy.text));
    assert_eq!(echoed[1].text, format!("The king said{}", other.text));
    assert_eq!(client.choice(json!({"prompt": ids, "echo": true})).await.text, echoed[0].text);
    // Unknown fields are ignored.
    let unknown = json!({"user": "u", "metadata": {"a": ["b"]}, "unheard_of": [1, {"deep": null}], "": 1});
    assert_eq!(client.choice(unknown).await, *greedy);
    // The default is sixteen tokens. The newer field name takes precedence.
    let usual = client.send(COMPLETIONS, &json!({"prompt": PROMPT, "ignore_eos": true})).await.ok();
    assert_eq!(usual["usage"]["completion_tokens"], 16);
    assert_eq!(
        client.choice(json!({"max_completion_tokens": 3, "max_tokens": 5})).await.ids,
        greedy.ids[..3]
    );
}

/// Roles and content parts of chats in the template.
async fn chats(client: &HttpClient) {
    let say = async |messages: Value| {
        let body = json!({"messages": messages, "max_tokens": 8, "temperature": 0, "ignore_eos": true, "return_token_ids": true});
        let answer = client.send(CHAT, &body).await.ok();
        assert_eq!(answer["object"], "chat.completion");
        assert_eq!(answer["choices"][0]["message"]["role"], "assistant");
        let stream = merged(body, &json!({"stream": true}));
        let events = client.send(CHAT, &stream).await.events();
        assert_eq!(events[0]["choices"][0]["delta"], json!({"role": "assistant", "content": ""}));
        assert_eq!(CollectedChoice::all(&events), CollectedChoice::all(std::slice::from_ref(&answer)));
        (answer["usage"]["prompt_tokens"].clone(), CollectedChoice::all(&[answer]).remove(0))
    };
    let plain =
        say(json!([{"role": "system", "content": "Be kind."}, {"role": "user", "content": "a\nb"}])).await;
    let parts = json!([
        {"role": "developer", "content": "Be kind.", "name": "x"},
        {"role": "user", "content": [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]},
    ]);
    assert_eq!(say(parts).await, plain);
    let talk = json!([
        {"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}, {"role": "user", "content": "c"},
    ]);
    assert_ne!(say(talk).await, plain);
    // This model's template has no tools and would reject their role: their text becomes that of the user.
    let result =
        json!([{"role": "user", "content": "a"}, {"role": "tool", "content": "b", "tool_call_id": "c"}]);
    let words = json!([
        {"role": "user", "content": "a"}, {"role": "user", "content": "<tool_response>\nb\n</tool_response>"},
    ]);
    assert_eq!(say(result).await, say(words).await);
    // Errors of the template are passed on in its own words.
    let late = json!([{"role": "user", "content": "a"}, {"role": "system", "content": "b"}]);
    let refused = client.send(CHAT, &json!({"messages": late})).await;
    refused.refuses("messages");
    assert!(refused.text().contains("a system message comes first or not at all"));
    // The same prompt as ids.
    let rendered =
        client.send("/tokenize", &json!({"messages": [{"role": "user", "content": "hi"}]})).await.ok();
    let chat = say(json!([{"role": "user", "content": "hi"}])).await;
    assert_eq!(rendered["count"], chat.0);
    let ids = client.choice(json!({"prompt": rendered["tokens"], "max_tokens": 8})).await;
    assert_eq!(ids, chat.1);
}

/// Framing and usage of a stream.
async fn streams(client: &HttpClient) {
    let body = HttpClient::body(&json!({"stream": true, "stream_options": {"include_usage": true}, "n": 2}));
    let answer = client.send(COMPLETIONS, &body).await;
    let mut events = answer.events();
    let last = events.pop().unwrap();
    assert_eq!(last["choices"], json!([]));
    assert_eq!(last["usage"]["completion_tokens"], 24);
    let keys = ["choices", "created", "id", "model", "object", "usage"];
    for event in events.iter().chain([&last]) {
        assert_eq!(
            event.as_object().unwrap().keys().collect::<BTreeSet<_>>(),
            keys.iter().map(|key| (*key).to_owned()).collect::<BTreeSet<_>>().iter().collect()
        );
        for name in ["id", "created", "model", "object"] {
            assert_eq!(event[name], last[name]);
        }
    }
    assert!(
        events
            .iter()
            .all(|event| event["usage"].is_null() && event["choices"].as_array().unwrap().len() == 1)
    );
    let body = HttpClient::body(&json!({"stream": true}));
    let events = client.send(COMPLETIONS, &body).await.events();
    assert!(events.iter().all(|event| event.get("usage").is_none()));
}

/// Stop strings across token borders, stop tokens, end of sequence, and minimum lengths.
async fn ends(client: &HttpClient, greedy: &CollectedChoice) {
    // Every substring of three characters, most of which cross token borders.
    let starts: Vec<usize> = greedy.text.char_indices().map(|(at, _)| at).collect();
    for window in starts.windows(4).step_by(5) {
        let stop = &greedy.text[window[0]..window[3]];
        let cut = &greedy.text[..greedy.text.find(stop).unwrap()];
        let choice = client.choice(json!({"stop": ["\u{1}never", stop]})).await;
        assert_eq!((choice.text.as_str(), choice.finish.as_str()), (cut, "stop"), "stop at {stop:?}");
    }
    // An incomplete stop string at the end is part of the text.
    let near = format!("{}\u{1}", greedy.text.chars().last().unwrap());
    assert_eq!(client.choice(json!({ "stop": near })).await, *greedy);
    // A stop string before the minimum length is text; a later one ends the choice.
    let early: String = greedy.text.chars().take(2).collect();
    assert_eq!(client.choice(json!({"stop": early})).await.text, "");
    let choice = client.choice(json!({"stop": early, "min_tokens": 12})).await;
    assert_eq!((choice.text.as_str(), choice.ids.len()), (greedy.text.as_str(), 12));
    // A stop token ends the choice and is not part of it, but not before the minimum length.
    let id = greedy.ids[6];
    let first = greedy.ids.iter().position(|other| *other == id).unwrap();
    let choice = client.choice(json!({"stop_token_ids": [id]})).await;
    assert_eq!((&choice.ids[..], choice.finish.as_str()), (&greedy.ids[..first], "stop"));
    let choice = client.choice(json!({"stop_token_ids": [id], "min_tokens": 12})).await;
    assert_eq!((choice.ids.len(), choice.ids.contains(&id)), (12, false));
    // A forced end of sequence: immediate, ignored, or after the minimum length.
    let forced = json!({"logit_bias": {"1": 100}});
    let with = |extra: Value| merged(forced.clone(), &extra);
    let choice = client.choice(with(json!({"ignore_eos": false}))).await;
    assert_eq!((choice.ids.len(), choice.text.as_str(), choice.finish.as_str()), (0, "", "stop"));
    let choice = client.choice(with(json!({}))).await;
    assert_eq!((choice.ids.as_slice(), choice.text.as_str()), ([1; 12].as_slice(), ""));
    let choice = client.choice(with(json!({"skip_special_tokens": false, "logprobs": 0}))).await;
    assert_eq!(choice.ids, [1; 12]);
    assert!(choice.text.len() >= 12 && choice.text == choice.tokens.concat(), "{}", choice.text);
    let choice = client.choice(with(json!({"ignore_eos": false, "min_tokens": 5}))).await;
    assert_eq!((choice.ids.len(), choice.ids.contains(&1), choice.finish.as_str()), (5, false, "stop"));
    let usage = client.send(COMPLETIONS, &HttpClient::body(&with(json!({"ignore_eos": false})))).await.ok();
    assert_eq!(usage["usage"]["completion_tokens"], 1, "the end of sequence was drawn");
}

/// Temperature, filters, seeds, biases and penalties.
async fn draws(client: &HttpClient, greedy: &CollectedChoice) {
    // Filters that leave one token are greedy at any temperature.
    for filter in
        [json!({"top_k": 1}), json!({"top_p": 0}), json!({"min_p": 1}), json!({"temperature": 0, "top_k": 5})]
    {
        let hot = merged(json!({"temperature": 2, "seed": 3}), &filter);
        assert_eq!(client.choice(hot).await, *greedy, "{filter}");
    }
    // A seed gives the same tokens alone, in a batch and in a list. Choices differ.
    let seeded = |seed: u64| json!({"temperature": 1.2, "seed": seed});
    let one = client.choice(seeded(7)).await;
    assert_eq!(client.choice(seeded(7)).await, one);
    assert_ne!(client.choice(seeded(8)).await.ids, one.ids);
    let three = client.choices(merged(seeded(7), &json!({"n": 3}))).await;
    assert_eq!(three[0], one);
    assert!(three[1].ids != three[0].ids && three[2].ids != three[1].ids);
    let listed = client.choices(merged(seeded(7), &json!({"prompt": ["The king said", PROMPT]}))).await;
    assert_eq!(listed[1], one);
    let unseeded = HttpClient::body(&json!({"temperature": 1.5, "n": 8, "max_tokens": 16}));
    let drawn = CollectedChoice::all(&[client.send(COMPLETIONS, &unseeded).await.ok()]);
    assert!(drawn.iter().collect::<Vec<_>>().windows(2).any(|pair| pair[0].ids != pair[1].ids));
    // Biases force and forbid.
    let (first, second) = (greedy.ids[0].to_string(), greedy.ids[1].to_string());
    let banned = client.choice(json!({"logit_bias": { &first: -100, &second: -100 }})).await;
    assert!(!banned.ids.contains(&greedy.ids[0]) && !banned.ids.contains(&greedy.ids[1]));
    assert_eq!(client.choice(json!({"logit_bias": {"500": 100}})).await.ids, [500; 12]);
    // Penalties follow the formula: the token is the best of the twenty most likely after them.
    for (presence, frequency) in [(2.0, 0.0), (0.0, 2.0), (1.0, 0.5), (-2.0, -1.0)] {
        let extra = json!({
            "presence_penalty": presence, "frequency_penalty": frequency, "logprobs": 20, "max_tokens": 40,
        });
        let choice = client.choice(extra).await;
        let mut counts = BTreeMap::<&String, f64>::new();
        for ((token, logprob), top) in choice.tokens.iter().zip(&choice.logprobs).zip(&choice.top) {
            let after = |name: &String, logprob: f64| match counts.get(name) {
                Some(count) => logprob - presence - frequency * count,
                None => logprob,
            };
            let drawn = after(token, logprob.unwrap());
            for (name, rival) in top {
                let rival = after(name, rival.as_f64().unwrap());
                assert!(
                    drawn >= rival - 1e-4,
                    "{token:?} at {drawn}, {name:?} at {rival} ({presence}, {frequency})"
                );
            }
            *counts.entry(token).or_default() += 1.0;
        }
        assert!(counts.len() > 1);
    }
    // A strong repetition penalty prevents all repetition of the prompt and the answer.
    let prompt = client.send("/tokenize", &json!({"prompt": PROMPT})).await.ok();
    let prompt: BTreeSet<u64> =
        prompt["tokens"].as_array().unwrap().iter().filter_map(Value::as_u64).collect();
    let choice = client.choice(json!({"repetition_penalty": 100, "max_tokens": 30})).await;
    let distinct: BTreeSet<u64> = choice.ids.iter().map(|id| u64::from(*id)).collect();
    assert_eq!(distinct.len(), 30, "{:?}", choice.ids);
    assert!(distinct.is_disjoint(&prompt));
}

/// Log-probabilities in both forms, of answers and prompts.
async fn scores(client: &HttpClient, greedy: &CollectedChoice) {
    let plain = client.choice(json!({"logprobs": 3})).await;
    assert_eq!(plain.ids, greedy.ids);
    assert_eq!(plain.tokens.concat(), greedy.text);
    for ((name, logprob), top) in plain.tokens.iter().zip(&plain.logprobs).zip(&plain.top) {
        assert_eq!(top.len(), 3, "{top:?}");
        let (best, likeliest) = top.iter().next().unwrap();
        assert_eq!((best, likeliest.as_f64()), (name, *logprob), "the greedy token is the likeliest");
        assert!(logprob.unwrap() <= 0.0);
    }
    // Offsets count characters of the answer.
    let mut at = 0;
    for (offset, name) in plain.offsets.iter().zip(&plain.tokens) {
        assert_eq!(*offset, at);
        at += name.chars().count() as u64;
    }
    let none = client.choice(json!({"logprobs": 0})).await;
    assert!(none.top.iter().all(|top| top.len() == 1));
    // Scores of the prompt's own tokens; the first has no score.
    let scored = client.choice(json!({"logprobs": 1, "echo": true, "max_tokens": 0})).await;
    assert_eq!((scored.text.as_str(), scored.finish.as_str()), (PROMPT, "length"));
    assert_eq!(scored.logprobs[0], None);
    assert!(scored.logprobs[1..].iter().all(|logprob| logprob.is_some_and(|logprob| logprob <= 0.0)));
    let echoed = client.choice(json!({"logprobs": 3, "echo": true})).await;
    assert_eq!(echoed.tokens.concat(), format!("{PROMPT}{}", greedy.text));
    let prompt = echoed.tokens.len() - 12;
    for (echoed, plain) in echoed.logprobs[prompt..].iter().zip(&plain.logprobs) {
        assert!((echoed.unwrap() - plain.unwrap()).abs() < 1e-3);
    }
    // Chats have another form with the same values.
    let messages = json!([{"role": "user", "content": "hi"}]);
    let chat = json!({"messages": messages, "max_tokens": 6, "temperature": 0, "ignore_eos": true, "logprobs": true, "top_logprobs": 2});
    let answer = client.send(CHAT, &chat).await.ok();
    let content = answer["choices"][0]["logprobs"]["content"].as_array().unwrap().clone();
    let rendered = client.send("/tokenize", &json!({ "messages": messages })).await.ok();
    let plain = client.choice(json!({"prompt": rendered["tokens"], "max_tokens": 6, "logprobs": 2})).await;
    assert_eq!(content.len(), 6);
    for ((token, name), logprob) in content.iter().zip(&plain.tokens).zip(&plain.logprobs) {
        assert_eq!(token["token"], *name);
        assert!((token["logprob"].as_f64().unwrap() - logprob.unwrap()).abs() < 1e-3);
        assert_eq!(token["bytes"], json!(name.as_bytes()));
        assert_eq!(token["top_logprobs"].as_array().unwrap().len(), 2);
    }
    let streamed = client.send(CHAT, &merged(chat, &json!({"stream": true}))).await.events();
    let chunks =
        streamed.iter().flat_map(|event| event["choices"][0]["logprobs"]["content"].as_array().cloned());
    assert_eq!(chunks.flatten().collect::<Vec<_>>(), content);
}

/// A stream returns multi-byte characters completely, even if tokens are single bytes.
async fn characters(client: &HttpClient) {
    // The two bytes of "é" in the vocabulary of byte-level BPE.
    let vocabulary = std::fs::read_to_string(ModelFixture::demo().folder.join("tokenizer.json")).unwrap();
    let vocabulary: Value = serde_json::from_str(&vocabulary).unwrap();
    let id = |token: &str| vocabulary["model"]["vocab"][token].to_string();
    let bias = json!({ id("Ã"): 100, id("©"): 100 });
    let mut whole = 0;
    for seed in 0..6 {
        let extra = json!({"logit_bias": bias, "temperature": 2, "seed": seed, "max_tokens": 40});
        let choice = client.choice(extra.clone()).await;
        assert_eq!(choice.ids.len(), 40);
        let events = merged(HttpClient::body(&extra), &json!({"stream": true}));
        let mut given = String::new();
        for event in client.send(COMPLETIONS, &events).await.events() {
            given += event["choices"][0]["text"].as_str().unwrap();
            assert!(choice.text.starts_with(&given), "{given:?} is taken back in {:?}", choice.text);
        }
        whole += choice.text.matches('é').count();
    }
    assert!(whole > 0, "no character came of its two bytes");
}

/// Invalid requests are rejected with the name of the field.
async fn refusals(client: &HttpClient) {
    let message = json!([{"role": "user", "content": "hi"}]);
    let tool = json!([{"type": "function", "function": {"name": "f"}}]);
    let image = json!([{"role": "user", "content": [{"type": "image_url", "image_url": {"url": "data:,"}}]}]);
    let schema = json!({"type": "json_schema", "json_schema": {"name": "s", "schema": {"not": {}}}});
    for (body, param) in [
        (json!({"messages": message, "tools": [{"type": "retrieval"}]}), "tools[0].type"),
        (json!({"messages": message, "tools": tool, "tool_choice": "never"}), "tool_choice"),
        (json!({"messages": message, "tool_choice": "required"}), "tool_choice"),
        (json!({"messages": message, "response_format": schema}), "response_format.json_schema.schema"),
        (json!({"messages": image}), "messages[0].content[0]"),
        (json!({"messages": []}), "messages"),
        (json!({}), "messages"),
        (json!({"messages": [{"content": "hi"}]}), "messages[0].role"),
        (json!({"messages": [{"role": "robot", "content": "hi"}]}), "messages[0].role"),
        (json!({"messages": [{"role": "user"}]}), "messages[0].content"),
        (json!({"messages": message, "echo": true}), "echo"),
        (json!({"messages": message, "logprobs": 1}), "logprobs"),
    ] {
        client.refuses(CHAT, &body, param).await;
    }
    for (extra, param) in [
        (json!({"prompt": [5000]}), "prompt"),
        (json!({"prompt": [[1], [5000]]}), "prompt[1]"),
        (json!({"prompt": ""}), "prompt"),
        (json!({"prompt": []}), "prompt"),
        (json!({"prompt": [1, "a"]}), "prompt"),
        (json!({"prompt": -1}), "prompt"),
        (json!({"temperature": -0.5}), "temperature"),
        (json!({"top_p": -1}), "top_p"),
        (json!({"n": 17}), "n"),
        (json!({"max_tokens": -1}), "max_tokens"),
        (json!({"logit_bias": {"4096": 1}}), "logit_bias.4096"),
        (json!({"min_tokens": 13}), "min_tokens"),
        (json!({"logprobs": true}), "logprobs"),
        (json!({"stream_options": {}}), "stream_options"),
        (json!({"suffix": "x"}), "suffix"),
    ] {
        client.refuses(COMPLETIONS, &HttpClient::body(&extra), param).await;
    }
    for extra in [
        json!({"max_tokens": 1021}),
        json!({"max_tokens": 1e15 as u64}),
        json!({"prompt": vec![7; 1025], "max_tokens": 1}),
    ] {
        let error = client.send(COMPLETIONS, &HttpClient::body(&extra)).await.error(400);
        assert_eq!(
            (&error["code"], &error["type"]),
            (&json!("context_length_exceeded"), &json!("invalid_request_error"))
        );
        assert!(error["message"].as_str().unwrap().contains("1024 tokens"), "{error}");
    }
    let long = json!({"messages": [{"role": "user", "content": "word ".repeat(3000)}]});
    let error = client.send(CHAT, &long).await.error(400);
    assert_eq!((&error["code"], &error["param"]), (&json!("context_length_exceeded"), &json!("messages")));
}

/// Malformed requests get their status, or none, and affect no other client.
#[tokio::test(flavor = "multi_thread")]
async fn malformed_requests_get_their_status() {
    let server = MainHttp::start(&ModelFixture::demo().folder, &[], &[]).await;
    let client = HttpClient { address: server.address };
    let greedy = client.choice(json!({})).await;
    bodies(&server).await;
    heads(&server).await;
    pipelines(&server).await;
    assert_eq!(client.choice(json!({})).await, greedy, "the server is what it was");
    server.settles("remoe_requests_in_flight", 0).await;
}

async fn bodies(server: &MainHttp) {
    let mib = 1 << 20;
    let number = |digits: usize| format!(r#"{{"prompt": "a", "temperature": 1{}}}"#, "0".repeat(digits));
    for (body, param) in [
        (b"{\"prompt\": \"\xff\xfe\"}".to_vec(), Value::Null),
        (b"\xef\xbb\xbf{\"prompt\": \"a\"}".to_vec(), Value::Null),
        (b"{\"prompt\": \"\\ud800\"}".to_vec(), json!("prompt")),
        (b"".to_vec(), Value::Null),
        (b"[]".to_vec(), Value::Null),
        (vec![b'['; 4 * mib], Value::Null),
        ("{\"a\":".repeat(mib / 2).into_bytes(), Value::Null),
        (format!(r#"{{"prompt": {}1{}}}"#, "[".repeat(mib), "]".repeat(mib)).into_bytes(), Value::Null),
        (number(400).into_bytes(), json!("temperature")),
        (number(mib).into_bytes(), json!("temperature")),
        (br#"{"prompt": "a", "seed": 99999999999999999999999}"#.to_vec(), json!("seed")),
        (br#"{"prompt": "a", "n": 1e400}"#.to_vec(), json!("n")),
        (br#"{"prompt": "a", "top_p": NaN}"#.to_vec(), json!("top_p")),
        (br#"{"prompt": "a", "min_p": -Infinity}"#.to_vec(), json!("min_p")),
        (br#"{"prompt": "a", "prompt": "b"}"#.to_vec(), json!("prompt")),
        (br#"{"prompt": "a", "max_tokens": 1, "max_tokens": 2}"#.to_vec(), json!("max_tokens")),
        (b"{\"prompt\": \"a\nb\"}".to_vec(), json!("prompt")),
        (b"{\"prompt\": \"a\"} {}".to_vec(), Value::Null),
        (b"\x00".to_vec(), Value::Null),
    ] {
        let head =
            format!("POST {COMPLETIONS} HTTP/1.1\r\nHost: x\r\nContent-Length: {}\r\n\r\n", body.len());
        let answer = ask(server.address, [head.as_bytes(), &body].concat()).await;
        let shown = String::from_utf8_lossy(&body[..body.len().min(60)]).into_owned();
        let error = answer.error(400);
        // The position of the truncation decides whether the error can name a field.
        assert!(error["param"] == param || param.is_null(), "{shown}: {error}");
        assert!(error["message"].as_str().unwrap().len() < 1000, "{shown}: {error}");
    }
    // Four MiB and one byte.
    let full = |more: usize| {
        let body = r#"{"prompt": "a", "max_tokens": 1, "user": ""}"#;
        body.replace("\"\"}", &format!("\"{}\"}}", "x".repeat(4 * mib - body.len() + more)))
    };
    ask(server.address, post(COMPLETIONS, &full(0))).await.ok();
    assert_eq!(
        ask(server.address, post(COMPLETIONS, &full(1))).await.error(413)["code"],
        "request_too_large"
    );
    // Endless chunks are cut off with the same response.
    let mut endless = Connection::open(server.address).await;
    let head = format!("POST {COMPLETIONS} HTTP/1.1\r\nHost: x\r\nTransfer-Encoding: chunked\r\n\r\n");
    endless.write(head).await.unwrap();
    let chunk = format!("10000\r\n{}\r\n", " ".repeat(0x10000));
    for _ in 0..80 {
        endless.write(&chunk).await.unwrap();
    }
    endless.write("0\r\n\r\n").await.unwrap();
    endless.answer().await.unwrap().error(413);
    // Other content types than JSON, and unsupported methods.
    let typed = |kind: &str| {
        format!(
            "POST /tokenize HTTP/1.1\r\nHost: x\r\nContent-Type: {kind}\r\nContent-Length: 15\r\n\r\n{{\"prompt\": \"a\"}}"
        )
    };
    for kind in ["text/plain", "application/x-www-form-urlencoded", "multipart/form-data; boundary=x"] {
        assert_eq!(ask(server.address, typed(kind)).await.error(415)["code"], "unsupported_media_type");
    }
    ask(server.address, typed("application/json; charset=utf-8")).await.ok();
    let answer =
        ask(server.address, "PUT /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Length: 0\r\n\r\n").await;
    assert_eq!(answer.error(405)["code"], "method_not_supported");
    assert_eq!(answer.head.header("allow"), "POST");
    assert_eq!(ask(server.address, get("/v1/images/generations")).await.error(404)["code"], "unknown_url");
}

async fn heads(server: &MainHttp) {
    let status = async |request: Vec<u8>| {
        let mut connection = Connection::open(server.address).await;
        // The server may respond and close before it has read everything.
        let _closed = connection.write(request).await;
        connection.head().await.map_or(0, |head| head.status)
    };
    let many = |count: usize| (0..count).map(|index| format!("X-{index}: y\r\n")).collect::<String>();
    let with = |headers: &str| format!("GET /version HTTP/1.1\r\nHost: x\r\n{headers}\r\n").into_bytes();
    for (request, expected) in [
        (with(""), 200),
        (with(&many(90)), 200),
        (with(&many(200)), 431),
        (with(&format!("X-Long: {}\r\n", "y".repeat(1 << 20))), 431),
        (format!("GET /{} HTTP/1.1\r\nHost: x\r\n\r\n", "y".repeat(1 << 17)).into_bytes(), 414),
        (with("no colon\r\n"), 400),
        (with("X-Nul: a\0b\r\n"), 400),
        (with("Content-Length: -1\r\n"), 400),
        (with("Content-Length: 99999999999999999999999\r\n"), 400),
        (with("Content-Length: 1\r\nContent-Length: 2\r\n"), 400),
        (b"GET\r\n\r\n".to_vec(), 400),
        (b"\x00\x01\x02\x03\r\n\r\n".to_vec(), 400),
        (b"GET /version HTTP/9.9\r\n\r\n".to_vec(), 400),
        (b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03".to_vec(), 400),
        (b"GET http://elsewhere.example/version HTTP/1.1\r\nHost: x\r\n\r\n".to_vec(), 200),
        (b"GET /%76ersion HTTP/1.1\r\nHost: x\r\n\r\n".to_vec(), 404),
        (b"GET /../version HTTP/1.1\r\nHost: x\r\n\r\n".to_vec(), 404),
    ] {
        let shown = String::from_utf8_lossy(&request[..request.len().min(60)]).into_owned();
        assert_eq!(status(request).await, expected, "{shown:?}");
    }
    // Conflicting lengths of the body must not give two requests.
    let smuggled = format!(
        "POST {COMPLETIONS} HTTP/1.1\r\nHost: x\r\nContent-Length: 6\r\nTransfer-Encoding: chunked\r\n\r\n0\r\n\r\nGET /version HTTP/1.1\r\nHost: x\r\n\r\n"
    );
    let mut connection = Connection::open(server.address).await;
    connection.write(smuggled).await.unwrap();
    let answers = String::from_utf8_lossy(&connection.rest().await).into_owned();
    assert_eq!(answers.matches("HTTP/1.1 ").count(), 1, "{answers}");
    // A head may arrive byte by byte.
    let mut slow = Connection::open(server.address).await;
    for byte in get("/version").bytes() {
        slow.write([byte]).await.unwrap();
        tokio::task::yield_now().await;
    }
    slow.answer().await.unwrap().ok();
}

/// Pipelined requests are answered in order.
async fn pipelines(server: &MainHttp) {
    let body = |tokens: usize, stream: bool| {
        post(
            COMPLETIONS,
            &json!({"prompt": "a", "max_tokens": tokens, "ignore_eos": true, "stream": stream}).to_string(),
        )
    };
    let mut connection = Connection::open(server.address).await;
    let requests = [body(9, false), body(5, true), get("/version"), post("/tokenize", "{"), body(3, false)];
    connection.write(requests.concat()).await.unwrap();
    assert_eq!(connection.answer().await.unwrap().ok()["usage"]["completion_tokens"], 9);
    assert!(connection.answer().await.unwrap().events().len() >= 2);
    connection.answer().await.unwrap().ok();
    connection.answer().await.unwrap().error(400);
    assert_eq!(connection.answer().await.unwrap().ok()["usage"]["completion_tokens"], 3);
    // Garbage after a request does not affect the request.
    connection.write(body(4, false) + "\x01\x02 nonsense\r\n\r\n").await.unwrap();
    assert_eq!(connection.answer().await.unwrap().ok()["usage"]["completion_tokens"], 4);
}
