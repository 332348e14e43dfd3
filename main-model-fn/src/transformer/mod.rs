//! The model's non-expert modules, written once for every set of operations.
//!
//! One call of [`Model::forward`] takes the rows of all sequences of an iteration through all layers: projections,
//! norms and routers see them as one matrix, attention knows which rows belong together, experts are the business of
//! [`crate::experts`].

mod attention;
mod error;
mod load;
mod mlp;
mod trace;

pub(crate) use error::ForwardError;
pub(crate) use trace::Trace;
pub use trace::{InspectLevel, LayerRouting};

use crate::backend::{Backend, BackendError, Held, Span};
use crate::dispatch::Experts;
use crate::pages::SequenceCache;
use attention::{Attention, Context};
use mlp::Mlp;
use remoe_model::Multipliers;

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

    /// Copies the keys and values of page `from` to page `to`.
    ///
    /// # Errors
    /// There is no memory for `to`.
    fn copy_page(&mut self, from: usize, to: usize) -> Result<(), BackendError>;

    /// Bytes of a page of keys and values, all layers together.
    fn page_bytes(&self) -> usize;

    /// Elements of a hidden state.
    fn hidden(&self) -> usize;
}

/// The model's weights outside of its routed experts, on a device.
pub(crate) struct Transformer<B: Backend> {
    ops: B,
    pages: B::Pages,
    hidden: usize,
    vocab: usize,
    embedding: B::Embedding,
    /// Whether the embedding and the head are the same memory.
    tied: bool,
    layers: Vec<Layer<B>>,
    positions: Positions<B>,
    norm: B::Norm,
    head: B::Linear,
    multipliers: Multipliers,
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
    /// What is wanted of them.
    pub(crate) wanted: Wanted,
}

/// What is computed of a segment's rows behind the last layer.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Wanted {
    None,
    /// Logits of the last row.
    Last,
    /// Logits of all rows.
    All,
    /// Hidden states behind the final norm, of all rows.
    States,
}

/// What one iteration gives.
pub(crate) struct Output {
    /// The wanted rows' logits, one after the other, `vocab` each.
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
        let mut tokens = Vec::new();
        let mut positions = Vec::new();
        let (mut wanted, mut states) = (Vec::new(), Vec::new());
        let mut spans = Vec::with_capacity(segments.len());
        for segment in segments.iter() {
            let (first, rows, past) = (tokens.len(), segment.tokens.len(), segment.cache.length());
            tokens.extend_from_slice(segment.tokens);
            positions.extend(past..past + rows);
            match segment.wanted {
                Wanted::None => (),
                Wanted::Last => wanted.push(first + rows - 1),
                Wanted::All => wanted.extend(first..first + rows),
                Wanted::States => states.extend(first..first + rows),
            }
            spans.push(Span { first, rows, past, pages: segment.cache.page_ids() });
        }
        let hidden = trace == Some(InspectLevel::Hidden);
        let mut trace = trace.map(|_| Trace::default());
        experts.begin_iteration(tokens.len());
        let x = self.layers_forward(&tokens, &positions, &spans, experts, trace.as_mut())?;
        if let Some(trace) = trace.as_mut().filter(|_| hidden) {
            trace.hidden = self.ops.bytes(&x)?.into_owned();
        }
        let logits = self.logits(&x, &wanted)?;
        let states = match states.as_slice() {
            [] => Vec::new(),
            rows => self.ops.floats(&self.ops.norm(&self.norm, &self.ops.rows(&x, rows)?)?)?,
        };
        // Nothing can fail any more.
        for segment in segments {
            segment.cache.advance(segment.tokens.len());
        }
        Ok(Output { logits, vocab: self.vocab, states, trace })
    }

    fn copy_page(&mut self, from: usize, to: usize) -> Result<(), BackendError> {
        self.ops.copy_page(&mut self.pages, from, to)
    }

    fn page_bytes(&self) -> usize {
        B::page_bytes(&self.pages)
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

    fn layers_forward(
        &mut self,
        tokens: &[u32],
        positions: &[usize],
        spans: &[Span],
        experts: &mut Experts,
        mut trace: Option<&mut Trace>,
    ) -> Result<B::Tensor, ForwardError> {
        let ops = &self.ops;
        let scaled = |x: B::Tensor, factor: f64| if factor == 1.0 { Ok(x) } else { ops.scale(x, factor) };
        let Multipliers { embedding, residual, .. } = self.multipliers;
        let mut x = scaled(ops.embed(&self.embedding, tokens)?, embedding)?;
        let angles = match &self.positions {
            Positions::Rotary(rope) => Some(ops.angles(rope, positions)?),
            Positions::Learned(table) => {
                // A context is never longer than 2^31.
                let positions: Vec<u32> = positions.iter().map(|&position| position as u32).collect();
                x = ops.add(x, &ops.embed(table, &positions)?)?;
                None
            }
        };
        let mut at = Context { ops, pages: &mut self.pages, angles: angles.as_ref(), spans };
        for (id, layer) in self.layers.iter().enumerate() {
            let normed = ops.norm(&layer.before_attention, &x)?;
            let output = layer.attention.forward(id, &normed, &mut at)?;
            x = ops.add(x, &scaled(output, residual)?)?;
            let normed = ops.norm(&layer.before_mlp, &x)?;
            let output = match &layer.mlp {
                Mlp::Dense(network) => ops.gated(network, &normed)?,
                Mlp::Moe(moe) => {
                    let routing = trace.as_deref_mut().map(|trace| &mut trace.routing);
                    moe.forward(id, ops, &normed, experts, routing)?
                }
            };
            x = ops.add(x, &scaled(output, residual)?)?;
        }
        Ok(x)
    }

    fn logits(&self, x: &B::Tensor, wanted: &[usize]) -> Result<Vec<f32>, ForwardError> {
        if wanted.is_empty() {
            return Ok(Vec::new());
        }
        let normed = self.ops.norm(&self.norm, &self.ops.rows(x, wanted)?)?;
        let mut logits = self.ops.floats(&self.ops.linear(&self.head, &normed)?)?;
        if self.multipliers.logits_divisor != 1.0 {
            let divisor = self.multipliers.logits_divisor as f32;
            logits.iter_mut().for_each(|logit| *logit /= divisor);
        }
        Ok(logits)
    }
}
