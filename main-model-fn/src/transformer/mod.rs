//! The model's non-expert modules, written once for every set of operations.
//!
//! One call of [`Model::forward`] takes the rows of all sequences of an iteration through all layers: projections,
//! norms and routers see them as one matrix, attention knows which rows belong together, experts are the business of
//! [`crate::experts`].

mod attention;
mod error;
mod load;
mod mlp;
mod pass;
mod trace;

pub(crate) use error::ForwardError;
pub(crate) use pass::{StepBudget, StepKind};
pub(crate) use trace::Trace;
pub use trace::{InspectLevel, LayerRouting};

use crate::backend::{Backend, BackendError, ResidentPart, Span};
use crate::dispatch::Experts;
use crate::pages::{PageNeeds, SequenceCache};
use attention::{Attention, AttentionContext};
use mlp::Mlp;
use pass::Pass;
use remoe_model::Multipliers;
use std::collections::BTreeMap;

/// The model as the engine sees it.
pub(crate) trait Model: Send {
    /// Called on the engine's thread before everything else.
    fn enter_thread(&self);

    /// Forwards every segment's tokens and extends its cache by them, which has pages for that.
    ///
    /// # Errors
    /// An operation fails, or experts are out of reach. The caches are as long as before: the same
    /// tokens can be forwarded again, over what was written of them.
    fn forward(
        &mut self,
        segments: &mut [Segment<'_>],
        experts: &mut Experts,
        trace: Option<InspectLevel>,
    ) -> Result<Output, ForwardError>;

    /// Begins a layered prefill: the segments' tokens go through the layers in steps, each a part of a layer, between
    /// which other forwards can be made. Their rows are the bits that [`forward`](Self::forward) would give. `id` names
    /// the pass. The caches keep their length until it is finished, and their pages must be theirs until then.
    ///
    /// # Errors
    /// An operation fails.
    fn begin_pass(
        &mut self,
        id: u64,
        segments: &[Segment<'_>],
        trace: Option<InspectLevel>,
    ) -> Result<(), ForwardError>;

    /// Where pass `id` is between two layers: drops the rows of segments that have left. Whether there were any.
    ///
    /// # Errors
    /// An operation fails. The pass is gone then.
    fn close_gaps(&mut self, id: u64) -> Result<bool, ForwardError>;

    /// Takes steps of pass `id` while `budget` allows, one at least. True once it has gone through all layers.
    ///
    /// # Errors
    /// As [`forward`](Self::forward). The pass is gone then; the caches are as long as before.
    fn advance_pass(
        &mut self,
        id: u64,
        experts: &mut Experts,
        budget: &mut dyn StepBudget,
    ) -> Result<bool, ForwardError>;

    /// Takes segment `index` out of pass `id`: its pages are not written any more. Later ones move up.
    fn leave_pass(&mut self, id: u64, index: usize);

    /// Ends pass `id`, which has gone through all layers: gives what is wanted of its `segments`, those that have not
    /// left, and extends their caches.
    ///
    /// # Errors
    /// As [`forward`](Self::forward).
    fn finish_pass(&mut self, id: u64, segments: &mut [Segment<'_>]) -> Result<Output, ForwardError>;

    /// Forgets pass `id`.
    fn drop_pass(&mut self, id: u64);

    /// Copies the keys and values of page `from` to page `to`.
    ///
    /// # Errors
    /// There is no memory for `to`.
    fn copy_page(&mut self, from: usize, to: usize) -> Result<(), BackendError>;

    /// Bytes of a page of keys and values.
    fn page_bytes(&self) -> usize;

    /// Makes room for `count` pages, or for as many as the device has memory for beside its workspace. Sequences have up to
    /// `positions` positions. Returns how many.
    ///
    /// # Errors
    /// The device has no room for one.
    fn reserve_pages(&mut self, count: usize, positions: usize) -> Result<usize, BackendError>;

    /// Returns the bytes of the device's memory that pages leave to iterations.
    fn workspace_bytes(&self) -> usize;

    /// Pages that its sequences need.
    fn page_needs(&self) -> PageNeeds;

    /// Elements of a hidden state.
    fn hidden(&self) -> usize;
}

/// The model's weights outside of its routed experts, on a device.
pub(crate) struct Transformer<B: Backend> {
    ops: B,
    pages: B::Pages,
    page_needs: PageNeeds,
    hidden: usize,
    vocab: usize,
    embedding: B::Embedding,
    /// Set if the embedding and the head are the same memory.
    tied: bool,
    layers: Vec<Layer<B>>,
    positions: Positions<B>,
    norm: B::Norm,
    head: B::Linear,
    multipliers: Multipliers,
    /// Layered prefills under way.
    passes: BTreeMap<u64, Pass<B>>,
}

/// How the model knows where a token is.
enum Positions<B: Backend> {
    Rotary(B::Rope),
    /// A row for each position.
    Learned(B::Embedding),
}

struct Layer<B: Backend> {
    before_attention: B::Norm,
    attention: Attention<B>,
    before_mlp: B::Norm,
    mlp: Mlp<B>,
}

/// Some rows of one sequence.
pub(crate) struct Segment<'a> {
    /// The tokens to forward; their positions follow the cache's.
    pub(crate) tokens: &'a [u32],
    pub(crate) cache: &'a mut SequenceCache,
    /// Outputs that are wanted of them.
    pub(crate) wanted: OutputRows,
}

/// The rows of segments, one after the other.
struct SegmentRows {
    tokens: Vec<u32>,
    positions: Vec<usize>,
    spans: Vec<Span>,
}

impl SegmentRows {
    fn of(segments: &[Segment<'_>]) -> Self {
        let (mut tokens, mut positions) = (Vec::new(), Vec::new());
        let mut spans = Vec::with_capacity(segments.len());
        for segment in segments {
            let (first, rows, past) = (tokens.len(), segment.tokens.len(), segment.cache.length());
            tokens.extend_from_slice(segment.tokens);
            positions.extend(past..past + rows);
            spans.push(Span { first, rows, past, tables: segment.cache.page_tables() });
        }
        Self { tokens, positions, spans }
    }
}

/// Outputs computed of a segment's rows behind the last layer.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum OutputRows {
    None,
    /// Logits of the last row.
    Last,
    /// Logits of the last row, of which only so many of the largest need be exact.
    Likeliest(usize),
    /// Logits of all rows.
    All,
    /// Hidden states behind the final norm, of all rows.
    States,
}

/// Output of one iteration.
pub(crate) struct Output {
    /// The wanted rows' logits, one after the other, `vocab` each. Where the largest were enough and the rest stayed on the
    /// device, the rest are the least float32.
    pub(crate) logits: Vec<f32>,
    /// Entries per row of logits.
    pub(crate) vocab: usize,
    /// The wanted rows' hidden states behind the final norm, one after the other.
    pub(crate) states: Vec<f32>,
    /// Routing and final hidden states of all rows, when asked for.
    pub(crate) trace: Option<Trace>,
}

impl<B: Backend> Model for Transformer<B> {
    fn enter_thread(&self) {
        self.ops.enter_thread();
    }

    fn forward(
        &mut self,
        segments: &mut [Segment<'_>],
        experts: &mut Experts,
        trace: Option<InspectLevel>,
    ) -> Result<Output, ForwardError> {
        // After a failure it may be within a layer.
        self.ops.enter_layer(None);
        let rows = SegmentRows::of(segments);
        let mut traced = trace.map(|_| Trace::default());
        experts.begin_iteration(rows.tokens.len());
        let x = self.layers_forward(rows, experts, traced.as_mut())?;
        self.output(&x, segments, traced, trace == Some(InspectLevel::Hidden))
    }

    fn begin_pass(
        &mut self,
        id: u64,
        segments: &[Segment<'_>],
        trace: Option<InspectLevel>,
    ) -> Result<(), ForwardError> {
        let rows = SegmentRows::of(segments);
        let (x, angles) = self.embedded(&rows.tokens, &rows.positions)?;
        self.passes.insert(id, Pass::new(x, angles, rows.spans, trace));
        Ok(())
    }

    fn close_gaps(&mut self, id: u64) -> Result<bool, ForwardError> {
        let Some(mut pass) = self.passes.remove(&id) else { return Ok(false) };
        let closed = pass.close_gaps(&self.ops)?;
        self.passes.insert(id, pass);
        Ok(closed)
    }

    fn advance_pass(
        &mut self,
        id: u64,
        experts: &mut Experts,
        budget: &mut dyn StepBudget,
    ) -> Result<bool, ForwardError> {
        let Some(mut pass) = self.passes.remove(&id) else { return Ok(true) };
        // Its rows stay as they are until the next call.
        experts.begin_iteration(pass.rows());
        let done = self.advance(&mut pass, experts, budget);
        self.ops.enter_layer(None);
        let done = done?;
        self.passes.insert(id, pass);
        Ok(done)
    }

    fn leave_pass(&mut self, id: u64, index: usize) {
        if let Some(pass) = self.passes.get_mut(&id) {
            pass.leave(index);
        }
    }

    fn finish_pass(&mut self, id: u64, segments: &mut [Segment<'_>]) -> Result<Output, ForwardError> {
        let missing = BackendError::Shape { what: "layered prefill", actual: 0, expected: 1 };
        let pass = self.passes.remove(&id).ok_or(missing)?;
        let (x, trace, hidden) = pass.ended();
        self.output(&x, segments, trace, hidden)
    }

    fn drop_pass(&mut self, id: u64) {
        self.passes.remove(&id);
    }

    fn copy_page(&mut self, from: usize, to: usize) -> Result<(), BackendError> {
        self.ops.copy_page(&mut self.pages, from, to)
    }

    fn page_bytes(&self) -> usize {
        B::page_bytes(&self.pages)
    }

    fn reserve_pages(&mut self, count: usize, positions: usize) -> Result<usize, BackendError> {
        self.ops.reserve_pages(&mut self.pages, count, positions)
    }

    fn workspace_bytes(&self) -> usize {
        B::workspace_bytes(&self.pages)
    }

    fn page_needs(&self) -> PageNeeds {
        self.page_needs
    }

    fn hidden(&self) -> usize {
        self.hidden
    }
}

impl<B: Backend> Layer<B> {
    fn weight_bytes(&self) -> usize {
        self.before_attention.bytes()
            + self.attention.weight_bytes()
            + self.before_mlp.bytes()
            + self.mlp.weight_bytes()
    }
}

/// `x` times `factor`, which most models leave at 1.
fn scaled<B: Backend>(ops: &B, x: B::Tensor, factor: f64) -> Result<B::Tensor, BackendError> {
    if factor == 1.0 { Ok(x) } else { ops.scale(x, factor) }
}

impl<B: Backend> Transformer<B> {
    /// Bytes of memory that the weights take, all of them outside of routed experts.
    pub(crate) fn weight_bytes(&self) -> usize {
        let positions = match &self.positions {
            Positions::Rotary(_) => 0,
            Positions::Learned(table) => table.bytes(),
        };
        let embedding = if self.tied { 0 } else { self.embedding.bytes() };
        let layers: usize = self.layers.iter().map(Layer::weight_bytes).sum();
        layers + positions + self.norm.bytes() + self.head.bytes() + embedding
    }

    /// The rows of `tokens` before the first layer, and what rotates them.
    fn embedded(
        &self,
        tokens: &[u32],
        positions: &[usize],
    ) -> Result<(B::Tensor, Option<B::Angles>), ForwardError> {
        let ops = &self.ops;
        let x = scaled(ops, ops.embed(&self.embedding, tokens)?, self.multipliers.embedding)?;
        match &self.positions {
            Positions::Rotary(rope) => Ok((x, Some(ops.angles(rope, positions)?))),
            Positions::Learned(table) => {
                // A context is never longer than 2^31.
                let positions: Vec<u32> = positions.iter().map(|&position| position as u32).collect();
                Ok((ops.add(x, &ops.embed(table, &positions)?)?, None))
            }
        }
    }

    fn layers_forward(
        &mut self,
        rows: SegmentRows,
        experts: &mut Experts,
        mut trace: Option<&mut Trace>,
    ) -> Result<B::Tensor, ForwardError> {
        let (mut x, angles) = self.embedded(&rows.tokens, &rows.positions)?;
        let ops = &self.ops;
        let residual = self.multipliers.residual;
        let spans = ops.spans(&self.pages, rows.spans)?;
        let mut at = AttentionContext { ops, pages: &mut self.pages, angles: angles.as_ref(), spans: &spans };
        for (id, layer) in self.layers.iter().enumerate() {
            ops.enter_layer(Some(id));
            let normed = ops.norm(&layer.before_attention, &x)?;
            let output = layer.attention.forward(id, &normed, &mut at)?;
            x = ops.add(x, &scaled(ops, output, residual)?)?;
            let normed = ops.norm(&layer.before_mlp, &x)?;
            let output = match &layer.mlp {
                Mlp::Dense(network) => ops.gated(network, &normed)?,
                Mlp::Moe(moe) => {
                    let routing = trace.as_deref_mut().map(|trace| &mut trace.routing);
                    moe.forward(id, ops, &normed, experts, routing)?
                }
            };
            x = ops.add(x, &scaled(ops, output, residual)?)?;
        }
        ops.enter_layer(None);
        Ok(x)
    }

    /// Computes the outputs that are wanted of the rows `x` behind the last layer. Extends the segments' caches.
    fn output(
        &self,
        x: &B::Tensor,
        segments: &mut [Segment<'_>],
        mut trace: Option<Trace>,
        hidden: bool,
    ) -> Result<Output, ForwardError> {
        let (mut wanted, mut states, mut first) = (Vec::new(), Vec::new(), 0);
        for segment in segments.iter() {
            let rows = first..first + segment.tokens.len();
            first = rows.end;
            match segment.wanted {
                OutputRows::None => (),
                OutputRows::Last => wanted.extend(rows.last().map(|row| (row, None))),
                OutputRows::Likeliest(count) => wanted.extend(rows.last().map(|row| (row, Some(count)))),
                OutputRows::All => wanted.extend(rows.map(|row| (row, None))),
                OutputRows::States => states.extend(rows),
            }
        }
        if let Some(trace) = trace.as_mut().filter(|_| hidden) {
            trace.hidden = self.ops.bytes(x)?.into_owned();
        }
        let logits = self.logits(x, &wanted)?;
        let states = match states.as_slice() {
            [] => Vec::new(),
            rows => self.ops.floats(&self.ops.norm(&self.norm, &self.ops.rows(x, rows)?)?)?,
        };
        // Nothing can fail any more.
        for segment in segments {
            segment.cache.advance(segment.tokens.len());
        }
        Ok(Output { logits, vocab: self.vocab, states, trace })
    }

    /// The logits of rows of `x`; of some of them only so many of the largest.
    fn logits(&self, x: &B::Tensor, wanted: &[(usize, Option<usize>)]) -> Result<Vec<f32>, ForwardError> {
        if wanted.is_empty() {
            return Ok(Vec::new());
        }
        let (ops, divisor) = (&self.ops, self.multipliers.logits_divisor as f32);
        let divided = |mut logits: Vec<f32>| {
            if divisor != 1.0 {
                logits.iter_mut().for_each(|logit| *logit /= divisor);
            }
            logits
        };
        let rows: Vec<usize> = wanted.iter().map(|&(row, _)| row).collect();
        let logits = ops.linear(&self.head, &ops.norm(&self.norm, &ops.rows(x, &rows)?)?)?;
        let most = wanted.iter().filter_map(|&(_, count)| count).max();
        let Some(most) = most.filter(|_| B::SELECTS_LOGITS) else { return Ok(divided(ops.floats(&logits)?)) };
        let those = |is_likeliest: bool| -> Vec<usize> {
            let these = wanted.iter().enumerate().filter(|(_, (_, count))| count.is_some() == is_likeliest);
            these.map(|(at, _)| at).collect()
        };
        let (likeliest, whole) = (those(true), those(false));
        let mut all = vec![f32::MIN; wanted.len() * self.vocab];
        let most = most.min(self.vocab);
        let (tokens, values) = ops.likeliest(&ops.rows(&logits, &likeliest)?, most)?;
        let values = divided(values);
        let selected = tokens.chunks_exact(most).zip(values.chunks_exact(most));
        for (&at, (tokens, values)) in likeliest.iter().zip(selected) {
            for (&token, &value) in tokens.iter().zip(values) {
                if let Some(logit) = all[at * self.vocab..][..self.vocab].get_mut(token as usize) {
                    *logit = value;
                }
            }
        }
        if !whole.is_empty() {
            let rows = divided(ops.floats(&ops.rows(&logits, &whole)?)?);
            for (&at, row) in whole.iter().zip(rows.chunks_exact(self.vocab)) {
                all[at * self.vocab..][..self.vocab].copy_from_slice(row);
            }
        }
        Ok(all)
    }
}
