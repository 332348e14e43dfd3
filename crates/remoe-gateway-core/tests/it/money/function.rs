//! Main functions that speak HTTP byte by byte, as the scripts of requests have it, and end at any time.

use super::script::{Api, Fault, Script, SeededChoices};
use remoe_billing::{Meter, Phases, Rates, RequestWork, Worked};
use std::collections::{BTreeMap, BTreeSet};
use std::io;
use std::net::SocketAddr;
use std::sync::{Arc, Mutex};
use std::time::Duration;
use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::net::{TcpListener, TcpStream};
use tokio::task::{JoinHandle, JoinSet};

/// Requests that main functions have seen, and remote functions as they are now.
#[derive(Default)]
pub(super) struct World {
    /// Addresses of the remote functions of now.
    pub(super) remote: Mutex<Vec<String>>,
    pub(super) seen: Mutex<SeenRequests>,
}

#[derive(Default)]
pub(super) struct SeenRequests {
    /// How often a main function got a request.
    attempts: BTreeMap<u64, usize>,
    /// Requests that one of them has got and not refused.
    pub(super) had: BTreeSet<u64>,
    /// Answers that told of remote functions which had joined meanwhile.
    pub(super) joined: usize,
    /// Placeholders of the cost by request.
    pub(super) placeholders: BTreeMap<u64, String>,
}

/// The process of a main function.
pub(super) struct Process {
    pub(super) address: SocketAddr,
    accepting: JoinHandle<()>,
}

impl Process {
    pub(super) async fn start(world: Arc<World>) -> Self {
        let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
        let address = listener.local_addr().unwrap();
        let accepting = tokio::spawn(async move {
            let meter = Arc::new(Meter::default());
            // They end with it.
            let mut connections = JoinSet::new();
            loop {
                let Ok((stream, _)) = listener.accept().await else { return };
                let (world, meter) = (world.clone(), meter.clone());
                connections.spawn(async move { drop(serve(stream, &world, &meter).await) });
            }
        });
        Self { address, accepting }
    }

    /// Ends it, whatever it is doing.
    pub(super) fn kill(&self) {
        self.accepting.abort();
    }
}

impl Drop for Process {
    fn drop(&mut self) {
        self.kill();
    }
}

/// Answers the requests of one connection.
async fn serve(mut stream: TcpStream, world: &World, meter: &Meter) -> io::Result<()> {
    stream.set_nodelay(true)?;
    let mut came = Vec::new();
    loop {
        let Some(asked) = read(&mut stream, &mut came).await? else { return Ok(()) };
        let number: u64 = asked["x-request-id"].parse().unwrap();
        let script = Script::of(number);
        let attempt = {
            let mut seen = world.seen.lock().unwrap();
            let attempts = seen.attempts.entry(number).or_default();
            *attempts += 1;
            *attempts - 1
        };
        let fault = script.faults.get(attempt).copied().unwrap_or(Fault::None);
        if fault != Fault::Refuses {
            world.seen.lock().unwrap().had.insert(number);
        }
        tokio::time::sleep(Duration::from_millis(script.late)).await;
        let answer = match fault {
            Fault::Dies => return Ok(()),
            Fault::SentAway => error("503 Service Unavailable"),
            Fault::Refuses => error("400 Bad Request"),
            _ => answer(number, &script, fault, &asked, world, meter),
        };
        let mut dice = SeededChoices::new(script.seed ^ attempt as u64);
        let end = match fault {
            Fault::DiesAt(thousandths) => answer.len() * thousandths as usize / 1000,
            _ => answer.len(),
        };
        let mut rest = &answer[..end];
        while !rest.is_empty() {
            let most = if script.text > 10_000 { 200_000 } else { 400 };
            let (piece, more) = rest.split_at((1 + dice.below(most) as usize).min(rest.len()));
            stream.write_all(piece).await?;
            rest = more;
            match dice.below(20) {
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

/// The headers of the next request, whose body has come; none where there is none.
async fn read(stream: &mut TcpStream, came: &mut Vec<u8>) -> io::Result<Option<BTreeMap<String, String>>> {
    loop {
        if let Some(at) = came.windows(4).position(|bytes| bytes == b"\r\n\r\n") {
            let head = String::from_utf8(came[..at].to_vec()).unwrap();
            let pairs = head.lines().skip(1).filter_map(|line| line.split_once(": "));
            let headers: BTreeMap<_, _> =
                pairs.map(|(name, value)| (name.to_ascii_lowercase(), value.to_owned())).collect();
            let end = at + 4 + headers["content-length"].parse::<usize>().unwrap();
            if came.len() >= end {
                came.drain(..end);
                return Ok(Some(headers));
            }
        }
        if stream.read_buf(came).await? == 0 {
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
    asked: &BTreeMap<String, String>,
    world: &World,
    meter: &Meter,
) -> Vec<u8> {
    let told = told(script, fault, asked, world, meter);
    let placeholder = asked.get("x-remoe-cost-placeholder");
    if let Some(placeholder) = placeholder {
        world.seen.lock().unwrap().placeholders.insert(number, placeholder.clone());
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
            "HTTP/1.1 200 OK\r\nContent-Type: application/json\r\n{told}Content-Length: {length}\r\n\r\n{body}"
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
    answer.push_str(&format!("0\r\n{told}\r\n"));
    answer.into()
}

/// The headers, or trailers, that say what the answer took.
fn told(
    script: &Script,
    fault: Fault,
    asked: &BTreeMap<String, String>,
    world: &World,
    meter: &Meter,
) -> String {
    let Some(rates) = asked.get("x-remoe-rates") else { return String::new() };
    let rates: Rates = rates.parse().unwrap();
    let mut dice = SeededChoices::new(script.seed);
    let mut worked = || {
        let most = if fault == Fault::TellsTooMuch { u64::MAX } else { 3_000_000 };
        Worked { share: Phases { prefill: dice.below(most), decode: dice.below(most) }, busy: 1 }
    };
    let mut remote: BTreeSet<String> = rates.0.keys().filter(|name| *name != "main").cloned().collect();
    let before = remote.len();
    remote.extend(world.remote.lock().unwrap().iter().cloned());
    if remote.len() > before {
        world.seen.lock().unwrap().joined += 1;
    }
    // One that no gateway was ever told of.
    remote.insert("10.9.9.9:9".to_owned());
    let work = RequestWork {
        main: worked(),
        remote: remote.into_iter().map(|name| (name.into(), worked())).collect(),
        served: 1,
    };
    let mut told = meter.tell(&work, &rates);
    told.rivals = [("mix".to_owned(), 7)].into();
    let told = serde_json::to_string(&told).unwrap();
    match fault {
        Fault::TellsNothing => "x-remoe-tokens: 3, 4\r\n".to_owned(),
        Fault::TellsNonsense => "x-remoe-tokens: 3, 4\r\nx-remoe-told: {\"shares\":7\r\n".to_owned(),
        _ => format!("x-remoe-tokens: 3, 4\r\nx-remoe-told: {told}\r\n"),
    }
}
