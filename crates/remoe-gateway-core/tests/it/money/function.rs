//! Main functions that write HTTP byte by byte, by the scripts of requests, and may be killed at any time.

use super::script::{Api, Fault, Script, SeededChoices};
use remoe_billing::{Meter, Phases, Rates, RequestWork, WorkShare};
use std::collections::{BTreeMap, BTreeSet};
use std::io;
use std::net::SocketAddr;
use std::sync::{Arc, Mutex};
use std::time::Duration;
use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::net::{TcpListener, TcpStream};
use tokio::task::{JoinHandle, JoinSet};

/// State that all main functions share: requests so far, and the present remote functions.
#[derive(Default)]
pub(super) struct SharedState {
    /// Addresses of the present remote functions.
    pub(super) remote: Mutex<Vec<String>>,
    pub(super) log: Mutex<RequestLog>,
}

#[derive(Default)]
pub(super) struct RequestLog {
    /// Number of attempts by request.
    attempts: BTreeMap<u64, usize>,
    /// Requests that a main function got and did not refuse.
    pub(super) had: BTreeSet<u64>,
    /// Number of answers that reported remote functions which had joined meanwhile.
    pub(super) joined: usize,
    /// Cost placeholders by request.
    pub(super) placeholders: BTreeMap<u64, String>,
}

/// Simulated process of a main function.
pub(super) struct MainProcess {
    pub(super) address: SocketAddr,
    accepting: JoinHandle<()>,
}

impl MainProcess {
    pub(super) async fn start(shared: Arc<SharedState>) -> Self {
        let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
        let address = listener.local_addr().unwrap();
        let accepting = tokio::spawn(async move {
            let meter = Arc::new(Meter::default());
            // The connections end with the process.
            let mut connections = JoinSet::new();
            loop {
                let Ok((stream, _)) = listener.accept().await else { return };
                let (shared, meter) = (shared.clone(), meter.clone());
                connections.spawn(async move { drop(serve(stream, &shared, &meter).await) });
            }
        });
        Self { address, accepting }
    }

    /// Ends the process at once.
    pub(super) fn kill(&self) {
        self.accepting.abort();
    }
}

impl Drop for MainProcess {
    fn drop(&mut self) {
        self.kill();
    }
}

/// Answers the requests of one connection.
async fn serve(mut stream: TcpStream, shared: &SharedState, meter: &Meter) -> io::Result<()> {
    stream.set_nodelay(true)?;
    let mut received = Vec::new();
    loop {
        let Some(headers) = read_request(&mut stream, &mut received).await? else { return Ok(()) };
        let number: u64 = headers["x-request-id"].parse().unwrap();
        let script = Script::for_request(number);
        let attempt = {
            let mut log = shared.log.lock().unwrap();
            let attempts = log.attempts.entry(number).or_default();
            *attempts += 1;
            *attempts - 1
        };
        let fault = script.faults.get(attempt).copied().unwrap_or(Fault::None);
        if fault != Fault::Refuses {
            shared.log.lock().unwrap().had.insert(number);
        }
        tokio::time::sleep(Duration::from_millis(script.delay_ms)).await;
        let answer = match fault {
            Fault::Dies => return Ok(()),
            Fault::ShutsDown => error("503 Service Unavailable"),
            Fault::Refuses => error("400 Bad Request"),
            _ => answer(number, &script, fault, &headers, shared, meter),
        };
        let mut choices = SeededChoices::new(script.seed ^ attempt as u64);
        let end = match fault {
            Fault::DiesMidway(thousandths) => answer.len() * thousandths as usize / 1000,
            _ => answer.len(),
        };
        let mut rest = &answer[..end];
        while !rest.is_empty() {
            let max = if script.text > 10_000 { 200_000 } else { 400 };
            let (piece, more) = rest.split_at((1 + choices.below(max) as usize).min(rest.len()));
            stream.write_all(piece).await?;
            rest = more;
            match choices.below(20) {
                0 => tokio::time::sleep(Duration::from_millis(1)).await,
                1..=9 => tokio::task::yield_now().await,
                _ => {}
            }
        }
        if end < answer.len() {
            return Ok(());
        }
    }
}

/// Reads the next request. Returns its headers, or `None` at the end of the connection.
async fn read_request(
    stream: &mut TcpStream,
    received: &mut Vec<u8>,
) -> io::Result<Option<BTreeMap<String, String>>> {
    loop {
        if let Some(end_of_head) = received.windows(4).position(|bytes| bytes == b"\r\n\r\n") {
            let head = String::from_utf8(received[..end_of_head].to_vec()).unwrap();
            let pairs = head.lines().skip(1).filter_map(|line| line.split_once(": "));
            let headers: BTreeMap<_, _> =
                pairs.map(|(name, value)| (name.to_ascii_lowercase(), value.to_owned())).collect();
            let end = end_of_head + 4 + headers["content-length"].parse::<usize>().unwrap();
            if received.len() >= end {
                received.drain(..end);
                return Ok(Some(headers));
            }
        }
        if stream.read_buf(received).await? == 0 {
            return Ok(None);
        }
    }
}

fn error(status: &str) -> Vec<u8> {
    let body = r#"{"error":{"message":"no","type":"invalid_request_error","param":null,"code":null}}"#;
    let length = body.len();
    format!("HTTP/1.1 {status}\r\nContent-Type: application/json\r\nContent-Length: {length}\r\n\r\n{body}")
        .into()
}

/// Text in an answer that looks like a cost.
const FALSE_COST: &str = r#"\",\"cost\":\"0123456789abcdef0123456789abcdef\","#;

fn answer(
    number: u64,
    script: &Script,
    fault: Fault,
    headers: &BTreeMap<String, String>,
    shared: &SharedState,
    meter: &Meter,
) -> Vec<u8> {
    let report = report_headers(script, fault, headers, shared, meter);
    let placeholder = headers.get("x-remoe-cost-placeholder");
    if let Some(placeholder) = placeholder {
        shared.log.lock().unwrap().placeholders.insert(number, placeholder.clone());
    }
    let cost = placeholder.map(|text| format!(r#","cost":"{text}""#)).unwrap_or_default();
    let remoe = match script.has_figures && script.api.has_figures() {
        true => format!(r#","remoe":{{"experts":{{"local":1}}{cost}}}"#),
        false => String::new(),
    };
    let usage = format!(r#"{{"prompt_tokens":3,"completion_tokens":4{remoe}}}"#);
    let text = |part: u64| match part {
        0 => format!("{FALSE_COST}{}", ",".repeat(script.text)),
        _ => "x".to_owned(),
    };
    if !script.is_stream {
        let texts: Vec<String> =
            (0..script.parts).map(|part| format!(r#"{{"text":"{}"}}"#, text(part))).collect();
        let texts = texts.join(",");
        let body = match script.api {
            Api::Responses => {
                format!(r#"{{"id":"resp_{number}","status":"completed","output":[{texts}],"usage":{usage}}}"#)
            }
            _ => format!(r#"{{"id":"{number}","choices":[{texts}],"usage":{usage}}}"#),
        };
        let length = body.len();
        return format!(
            "HTTP/1.1 200 OK\r\nContent-Type: application/json\r\n{report}Content-Length: {length}\r\n\r\n{body}"
        )
        .into();
    }
    let mut events: Vec<String> = Vec::new();
    for part in 0..script.parts {
        let text = text(part);
        events.push(match script.api {
            Api::Responses => {
                format!("event: response.output_text.delta\ndata: {{\"delta\":\"{text}\"}}\n\n")
            }
            Api::Messages => format!("event: content_block_delta\ndata: {{\"text\":\"{text}\"}}\n\n"),
            _ => format!("data: {{\"choices\":[{{\"text\":\"{text}\"}}],\"usage\":null}}\n\n"),
        });
    }
    match script.api {
        Api::Responses => events.push(format!(
            "event: response.completed\ndata: {{\"response\":{{\"id\":\"resp_{number}\",\"status\":\"completed\",\
             \"output\":[],\"usage\":{usage}}}}}\n\n"
        )),
        Api::Messages => {
            events.push(format!("event: message_delta\ndata: {{\"usage\":{usage}}}\n\n"));
            events.push("event: message_stop\ndata: {}\n\n".to_owned());
        }
        _ => {
            if script.has_figures {
                events.push(format!("data: {{\"choices\":[],\"usage\":{usage}}}\n\n"));
            }
            events.push("data: [DONE]\n\n".to_owned());
        }
    }
    let mut answer = "HTTP/1.1 200 OK\r\nContent-Type: text/event-stream\r\nTransfer-Encoding: chunked\r\n\
                      Trailer: server-timing, x-remoe-tokens, x-remoe-told\r\n\r\n"
        .to_owned();
    for event in events {
        answer.push_str(&format!("{:x}\r\n{event}\r\n", event.len()));
    }
    answer.push_str(&format!("0\r\n{report}\r\n"));
    answer.into()
}

/// Returns the headers, or trailers, that report tokens and cost.
fn report_headers(
    script: &Script,
    fault: Fault,
    headers: &BTreeMap<String, String>,
    shared: &SharedState,
    meter: &Meter,
) -> String {
    let Some(rates) = headers.get("x-remoe-rates") else { return String::new() };
    let rates: Rates = rates.parse().unwrap();
    let mut choices = SeededChoices::new(script.seed);
    let mut random_work = || {
        let max = if fault == Fault::OverstatesCost { u64::MAX } else { 3_000_000 };
        WorkShare { share: Phases { prefill: choices.below(max), decode: choices.below(max) }, busy: 1 }
    };
    let mut remote: BTreeSet<String> = rates.0.keys().filter(|name| *name != "main").cloned().collect();
    let before = remote.len();
    remote.extend(shared.remote.lock().unwrap().iter().cloned());
    if remote.len() > before {
        shared.log.lock().unwrap().joined += 1;
    }
    // A function that no gateway knows.
    remote.insert("10.9.9.9:9".to_owned());
    let work = RequestWork {
        main: random_work(),
        remote: remote.into_iter().map(|name| (name.into(), random_work())).collect(),
        served: 1,
    };
    let mut cost = meter.report(&work, &rates);
    cost.rivals = [("mix".to_owned(), 7)].into();
    let cost = serde_json::to_string(&cost).unwrap();
    match fault {
        Fault::OmitsCost => "x-remoe-tokens: 3, 4\r\n".to_owned(),
        Fault::SendsInvalidCost => "x-remoe-tokens: 3, 4\r\nx-remoe-told: {\"shares\":7\r\n".to_owned(),
        _ => format!("x-remoe-tokens: 3, 4\r\nx-remoe-told: {cost}\r\n"),
    }
}
