//! `remoe up` with one share of remote experts, in one form.

use super::StorageForms;
use super::stream::{self, CompletionPrompt, Token};
use crate::context::BenchContext;
use crate::error::{ErrorContext, Result};
use crate::process::ChildProcess;
use serde_json::Value;
use std::collections::BTreeMap;
use std::net::SocketAddr;
use std::path::Path;
use std::process::Command;
use std::time::{Duration, Instant};
use tokio::runtime::Runtime;
use tokio::sync::oneshot;
use tokio::task::JoinSet;

/// The model's name in requests.
pub(super) const NAME: &str = "bench";

/// How long to wait before the function is asked again whether all of its experts are there.
const ASKED_AGAIN: Duration = Duration::from_millis(20);

/// A model that is served, and the client that asks it.
#[derive(Debug)]
pub(super) struct ServedModel {
    http: SocketAddr,
    /// One thread for all streams: the client takes as little of the machine as it can.
    runtime: Runtime,
    _process: ChildProcess,
}

impl ServedModel {
    pub(super) fn start(
        context: &BenchContext,
        model: &Path,
        ratio: f64,
        form: Option<StorageForms>,
    ) -> Result<Self> {
        let mut command = Command::new(context.program("remoe")?);
        command.arg("up").arg("--model").arg(model).args(["--remote-ratio", &ratio.to_string()]);
        if let Some(StorageForms { experts, dense, .. }) = form {
            command.args(["--experts-dtype", experts, "--dense-dtype", dense]);
        }
        command.args(["--port", "0", "--json", "--ready-timeout", "300", "--served-model-name", NAME]);
        command.env("REMOE_BIN_DIR", &context.programs).env("REMOE_LOG", "warn").env_remove("REMOE_API_KEY");
        let mut process = ChildProcess::start("remoe up", command)?;
        let line = process.line()?;
        let reading = || format!("reading the event {line:?}");
        let event: Value = serde_json::from_str(&line).doing(reading)?;
        let endpoint = event["endpoint"].as_str().and_then(|url| url.strip_prefix("http://"));
        let http = endpoint.doing(reading)?.parse().doing(reading)?;
        let runtime = tokio::runtime::Builder::new_current_thread()
            .enable_all()
            .build()
            .doing(|| "making a runtime for the client")?;
        let deployment = Self { http, runtime, _process: process };
        // What is measured is not to share the machine with those who still read weights.
        while deployment.metrics()?.0.get("remoe_experts_arriving").is_some_and(|left| *left > 0.0) {
            std::thread::sleep(ASKED_AGAIN);
        }
        Ok(deployment)
    }

    /// Decodes `prompts` together. None where they are together for too short, as on a machine so busy that some
    /// streams end before others begin.
    pub(super) fn decode(&self, prompts: &[CompletionPrompt]) -> Result<Option<Decoded>> {
        let (streams, metrics) = self.runtime.block_on(async {
            let (mut running, begun) = self.ask(prompts);
            for first in begun {
                // A stream that fails says so when it is joined.
                let _failed = first.await;
            }
            let all_begun = self.read_metrics().await?;
            let mut streams = Vec::from_iter(joined(&mut running).await?);
            let first_ended = self.read_metrics().await?;
            streams.extend(all_joined(&mut running).await?);
            Ok((streams, [all_begun, first_ended]))
        })?;
        let measuring = || "measuring decoding";
        let start = streams.iter().filter_map(|tokens| tokens.first()).max().doing(measuring)?;
        let end = streams.iter().filter_map(|tokens| tokens.last()).min().doing(measuring)?;
        let mut rate = 0.0;
        for tokens in &streams {
            let together: Vec<&Token> =
                tokens.iter().filter(|&token| (start..=end).contains(&token)).collect();
            let [first, .., last] = together.as_slice() else { return Ok(None) };
            rate += (together.len() - 1) as f64 / (**last - **first).as_secs_f64();
        }
        let [begun, ended] = metrics;
        let iterations = ended.gained_since(&begun, "remoe_iterations_total").filter(|count| *count > 0.0);
        let reads = ended.gained_since(&begun, "remoe_expert_reads_total");
        Ok(reads.zip(iterations).map(|(reads, iterations)| Decoded { rate, reads: reads / iterations }))
    }

    /// Prompt tokens per second of `prompts` that arrive together, from the first request to the last
    /// answer's only token.
    pub(super) fn prefill(&self, prompts: &[CompletionPrompt]) -> Result<f64> {
        let started = Instant::now();
        let streams = self.runtime.block_on(async {
            let (mut running, _) = self.ask(prompts);
            all_joined(&mut running).await
        })?;
        let end = streams.iter().flatten().max().doing(|| "measuring prefill: no tokens")?;
        let tokens: usize = prompts.iter().map(|prompt| prompt.ids.len()).sum();
        Ok(tokens as f64 / (*end - started).as_secs_f64())
    }

    /// The metrics of the main function.
    pub(super) fn metrics(&self) -> Result<ScrapedSeries> {
        self.runtime.block_on(self.read_metrics())
    }

    async fn read_metrics(&self) -> Result<ScrapedSeries> {
        let text = stream::get(self.http, "/metrics").await?;
        let of_model = format!("{{model=\"{NAME}\"}}");
        let values = text.lines().filter_map(|line| {
            let (name, value) = line.rsplit_once(' ')?;
            Some((name.replace(&of_model, ""), value.parse().ok()?))
        });
        Ok(ScrapedSeries(values.collect()))
    }

    /// Asks for all of `prompts`; with what tells that each stream has begun.
    fn ask(&self, prompts: &[CompletionPrompt]) -> (JoinSet<Result<Vec<Token>>>, Vec<oneshot::Receiver<()>>) {
        let mut streams = JoinSet::new();
        let begun = prompts.iter().map(|prompt| {
            let (tell, begun) = oneshot::channel();
            let stream = stream::complete(self.http, prompt.clone(), tell);
            streams.spawn_on(stream, self.runtime.handle());
            begun
        });
        let begun = begun.collect();
        (streams, begun)
    }
}

/// Streams that decoded together.
#[derive(Debug, Clone, Copy)]
pub(super) struct Decoded {
    /// Tokens per second of all of them, from when each has its first token to when the first one ends.
    pub(super) rate: f64,
    /// Experts whose weights the main function read, in the mean of those iterations, all layers together.
    pub(super) reads: f64,
}

/// The tokens of the next stream to end; none where all have.
async fn joined(streams: &mut JoinSet<Result<Vec<Token>>>) -> Result<Option<Vec<Token>>> {
    streams.join_next().await.map(|ended| ended.doing(|| "reading a stream")?).transpose()
}

/// The tokens of every stream that is left, in the order in which they end.
async fn all_joined(streams: &mut JoinSet<Result<Vec<Token>>>) -> Result<Vec<Vec<Token>>> {
    let mut ended = Vec::new();
    while let Some(tokens) = joined(streams).await? {
        ended.push(tokens);
    }
    Ok(ended)
}

/// Prometheus series at one moment.
#[derive(Debug)]
pub(super) struct ScrapedSeries(BTreeMap<String, f64>);

impl ScrapedSeries {
    /// The mean of the values that histogram `name` took between `earlier` and this; none where it took
    /// none.
    pub(super) fn mean_since(&self, earlier: &Self, name: &str) -> Option<f64> {
        let gained = |suffix: &str| self.gained_since(earlier, &format!("{name}{suffix}"));
        gained("_count").filter(|count| *count > 0.0).and_then(|count| Some(gained("_sum")? / count))
    }

    /// Returns the increase of `series` between `earlier` and this; `None` if there is no such series.
    fn gained_since(&self, earlier: &Self, series: &str) -> Option<f64> {
        Some(self.0.get(series)? - earlier.0.get(series)?)
    }

    /// Names of the histograms that begin with `prefix`.
    pub(super) fn histograms(&self, prefix: &str) -> Vec<String> {
        let names = self.0.keys().filter(|name| name.starts_with(prefix));
        names.filter_map(|name| name.strip_suffix("_sum")).map(str::to_owned).collect()
    }
}
