//! Tokens per second of the whole: OLMoE's shape with some of its layers, through the HTTP interface of
//! `remoe up`, with none, half and all of its experts remote, and with all of them local and quantised.
//!
//! All deployments are alive at the same time and asked in turn, so that a disturbance does not hit
//! one of them alone; those that are not asked sleep. Where its memory happens to lie makes one process a fifth
//! quicker than another of its kind: each round has its own.

mod bound;
mod deployment;
mod stream;

use crate::checkpoint::ModelShape;
use crate::context::{BenchContext, warm};
use crate::error::{BenchError, Result};
use crate::machine::available_memory;
use crate::pace::TimeShare;
use crate::report::{Bar, BenchSection};
use crate::series::Series;
use bound::Bound;
use deployment::{Decoded, ServedModel};
use serde_json::json;
use std::collections::BTreeMap;
use std::path::{Path, PathBuf};
use stream::CompletionPrompt;

/// Shares of remote experts; what the others are compared with comes first.
const RATIOS: [f64; 3] = [0.0, 0.5, 1.0];
/// Quantised forms that are measured besides: of experts, all of them local, and of other weights.
const FORMS: [StorageForms; 3] = [
    StorageForms { name: "int8", experts: "int8", dense: "int8" },
    StorageForms { name: "int4", experts: "int4", dense: "int8" },
    StorageForms { name: "int4 throughout", experts: "int4", dense: "int4" },
];
const BATCHES: [usize; 3] = [1, 4, 16];
/// Prompts that are prefilled together, at most: more take as many times longer and show the same.
const LARGEST_PREFILL: usize = 4;
const NAME: &str = "Whole model";
const ROUNDS: usize = 5;
/// Prompt of a decoding stream.
const SHORT_PROMPT: usize = 16;
/// Prompt of a prefill.
const LONG_PROMPT: usize = 512;
/// Tokens of a decoding stream.
const DECODED: usize = 48;

/// Attempts at a figure that a busy machine can spoil.
const ATTEMPTS: usize = 3;

/// Decoding with half of the experts remote on the same machine, as a share of all local.
const SHARE_BAR: Bar = Bar::AtLeast(0.95);

/// Memory of a deployment as a multiple of its weights, keys, values and buffers included.
const MEMORY_FACTOR: f64 = 1.25;

pub(super) fn measure(context: &BenchContext, share: &TimeShare) -> Result<BenchSection> {
    let decoded = if context.quick { DECODED / 4 } else { DECODED };
    let shape = ModelShape::olmoe(if context.quick { 1 } else { context.layers });
    let model = context.model(&format!("olmoe-{}", shape.layers), &shape)?;
    let bytes = warm(&model)?;
    // All quantised ones together take about as much as one that is not.
    let needed = (bytes as f64 * MEMORY_FACTOR) as u64 * (RATIOS.len() as u64 + 1);
    if available_memory() < needed {
        let why = format!(
            "expected {:.1} GB of free memory, got {:.1} GB; lower --layers",
            needed as f64 / 1e9,
            available_memory() as f64 / 1e9
        );
        return Err(BenchError::new("starting the deployments", why));
    }
    let remote = RATIOS.into_iter().map(|ratio| (ratio, None));
    let quantised = FORMS.into_iter().map(|form| (0.0, Some(form)));
    let mut configurations: Vec<_> =
        remote.chain(quantised).map(|(ratio, form)| Configuration::of(ratio, form)).collect();
    let mut bound = Bound::of(context, &model)?;
    let mut allowed: [Series; BATCHES.len()] = Default::default();
    let mut prompts = Prompts { vocab: shape.vocab as u64, made: 0 };
    let mut peers: Vec<Peer> =
        context.llama.iter().flat_map(|llama| &llama.models).map(|model| Peer::of(model)).collect();
    let ending = share.rounds(NAME, context.rounds(ROUNDS), |round| {
        // The files were read above.
        if round == 0 {
            return Ok(());
        }
        let start = |one: &Configuration| one.start(context, &model, &mut prompts);
        let deployments = configurations.iter().map(start).collect::<Result<Vec<_>>>()?;
        for (index, batch) in BATCHES.into_iter().enumerate() {
            let short = prompts.many(batch, SHORT_PROMPT, decoded);
            // The one with all experts local and as they are stored comes first, between two looks at the memory.
            let before = bound.bandwidth()?;
            for (other, (configuration, deployment)) in
                configurations.iter_mut().zip(&deployments).enumerate()
            {
                let decoded_at = configuration.decode(deployment, index, &short)?;
                if other == 0 {
                    let bandwidth = f64::midpoint(before, bound.bandwidth()?);
                    let positions = SHORT_PROMPT as f64 + decoded as f64 / 2.0;
                    let bytes = bound.step_bytes(batch, decoded_at.reads, positions);
                    allowed[index].push(batch as f64 * bandwidth / bytes);
                }
            }
            if batch > LARGEST_PREFILL {
                continue;
            }
            let long = prompts.many(batch, LONG_PROMPT, 1);
            for (configuration, deployment) in configurations.iter_mut().zip(&deployments) {
                let speed = deployment.prefill(&long)?;
                configuration.speed[PREFILL][index].push(speed);
            }
        }
        if let Some(llama) = &context.llama {
            for peer in &mut peers {
                let speed = llama.run(&peer.model, LONG_PROMPT, decoded)?;
                peer.speed[PREFILL].push(speed.prefill);
                peer.speed[DECODE].push(speed.decode);
            }
        }
        Ok(())
    });
    let mut part = BenchSection::new(
        NAME,
        json!({"rounds": ending.done, "shape": "OLMoE-1B-7B", "layers": shape.layers, "dtype": "bfloat16",
               "bytes": bytes, "prompt": LONG_PROMPT, "decoding_prompt": SHORT_PROMPT, "decoded": decoded,
               "ratios": RATIOS, "quantised": FORMS.map(|form| form.name), "batches": BATCHES}),
    );
    report(&mut part, &configurations);
    let local = configurations.first().map_or(&[][..], |local| &local.speed[DECODE]);
    for ((batch, allowed), ours) in BATCHES.iter().zip(&allowed).zip(local) {
        part.add(format!("limit: decode, batch {batch}, each needed byte read once"), "tokens/s", allowed);
        part.add_with_bar(
            format!("decode, batch {batch}: all local / limit"),
            "",
            &ours.over(allowed),
            bound::bar(),
        );
    }
    for peer in &peers {
        peer.report(&mut part, &configurations);
    }
    part.note(format!(
        "Prefill: prompts of {LONG_PROMPT} tokens, from the request to the last first token. Decode: \
         {decoded} tokens after prompts of {SHORT_PROMPT}, drawn at temperature 1; tokens of all streams \
         while all of them run. Both through HTTP, the client on the same machine. Ratios are of the same \
         round."
    ));
    part.conclude(ending);
    Ok(part)
}

fn report(part: &mut BenchSection, configurations: &[Configuration]) {
    for (index, batch) in BATCHES.into_iter().enumerate() {
        for (what, name) in [(PREFILL, "prefill"), (DECODE, "decode")] {
            for configuration in configurations {
                let name = format!("{name}, batch {batch}, {}", configuration.name());
                part.add(name, "tokens/s", &configuration.speed[what][index]);
            }
            let Some((local, others)) = configurations.split_first() else { continue };
            for other in others {
                let name = format!("{name}, batch {batch}: {} / all local", other.name());
                let share = other.speed[what][index].over(&local.speed[what][index]);
                if what == DECODE && other.ratio == RATIOS[1] {
                    part.add_with_bar(name, "", &share, SHARE_BAR);
                } else {
                    part.add(name, "", &share);
                }
            }
        }
    }
    for configuration in configurations {
        for (name, means) in &configuration.engine {
            let name = format!("engine: {name}, mean per call, batch 1, {}", configuration.name());
            part.add(name, "µs", means);
        }
    }
}

/// llama.cpp with one of its models.
struct Peer {
    model: PathBuf,
    name: String,
    /// Tokens per second of one stream.
    speed: [Series; 2],
}

impl Peer {
    fn of(model: &Path) -> Self {
        let name = model.file_stem().unwrap_or_default().to_string_lossy().into_owned();
        Self { model: model.to_owned(), name, speed: Default::default() }
    }

    /// Beside every one of ours whose experts are all local.
    fn report(&self, part: &mut BenchSection, configurations: &[Configuration]) {
        for (what, name) in [(PREFILL, "prefill"), (DECODE, "decode")] {
            part.add(format!("llama.cpp {}: {name}", self.name), "tokens/s", &self.speed[what]);
            for ours in configurations.iter().filter(|ours| ours.ratio == 0.0) {
                let form = ours.form.map_or("bfloat16", |form| form.name);
                let name = format!("{name}: {form} / llama.cpp {}", self.name);
                part.add(name, "", &ours.speed[what][0].over(&self.speed[what]));
            }
        }
    }
}

/// Indices of what is measured.
const PREFILL: usize = 0;
const DECODE: usize = 1;

/// Storage forms of weights, as `remoe up` takes them.
#[derive(Debug, Clone, Copy)]
struct StorageForms {
    name: &'static str,
    experts: &'static str,
    dense: &'static str,
}

/// A way to serve the model and what was measured of it.
struct Configuration {
    ratio: f64,
    form: Option<StorageForms>,
    /// Tokens per second.
    speed: [[Series; BATCHES.len()]; 2],
    /// Histograms of the engine while one stream decoded: their means.
    engine: BTreeMap<String, Series>,
}

impl Configuration {
    fn of(ratio: f64, form: Option<StorageForms>) -> Self {
        Self { ratio, form, speed: Default::default(), engine: BTreeMap::new() }
    }

    /// Starts it and touches every expert.
    fn start(&self, context: &BenchContext, model: &Path, prompts: &mut Prompts) -> Result<ServedModel> {
        let deployment = ServedModel::start(context, model, self.ratio, self.form)?;
        deployment.prefill(&prompts.many(1, LONG_PROMPT, 1))?;
        deployment.decode(&prompts.many(BATCHES[2], SHORT_PROMPT, 4))?;
        Ok(deployment)
    }

    fn name(&self) -> String {
        self.form.map_or_else(|| format!("remote ratio {}", self.ratio), |form| form.name.to_owned())
    }

    fn decode(
        &mut self,
        deployment: &ServedModel,
        index: usize,
        prompts: &[CompletionPrompt],
    ) -> Result<Decoded> {
        let before = deployment.metrics()?;
        let measured = (0..ATTEMPTS).find_map(|_| deployment.decode(prompts).transpose());
        let why = format!("streams hardly overlapped in {ATTEMPTS} attempts");
        let decoded = measured.unwrap_or_else(|| Err(BenchError::new("measuring decoding", why)))?;
        self.speed[DECODE][index].push(decoded.rate);
        // Without remote experts there is nothing to wait for.
        if prompts.len() == 1 && self.ratio > 0.0 {
            let after = deployment.metrics()?;
            for name in after.histograms("remoe_expert_") {
                let mean = after.mean_since(&before, &name).map(|seconds| seconds * 1e6);
                self.engine.entry(name).or_default().extend(mean);
            }
        }
        Ok(decoded)
    }
}

/// Makes prompts that differ in every token.
struct Prompts {
    vocab: u64,
    made: u64,
}

impl Prompts {
    fn many(&mut self, count: usize, tokens: usize, max_tokens: usize) -> Vec<CompletionPrompt> {
        (0..count).map(|_| self.one(tokens, max_tokens)).collect()
    }

    fn one(&mut self, tokens: usize, max_tokens: usize) -> CompletionPrompt {
        self.made += 1;
        let seed = self.made;
        let ids = (0..tokens as u64).map(|position| {
            let mixed = (seed << 32 | position).wrapping_mul(0x9e37_79b9_7f4a_7c15);
            ((mixed >> 32) % self.vocab) as u32
        });
        CompletionPrompt { ids: ids.collect(), max_tokens, seed }
    }
}
