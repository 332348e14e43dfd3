//! The model outside of its routed experts, written once for every [`Backend`].
//!
//! One call of [`Model::forward`] takes the rows of all sequences of an iteration through all layers. Projections, norms
//! and routers treat the rows as one matrix; attention works on the rows of each sequence. Routed experts are computed
//! by [`crate::dispatch`].

mod attention;
mod error;
mod layered_prefill;
mod load;
mod mlp;
mod trace;

pub(crate) use error::ForwardError;
pub(crate) use layered_prefill::{StepBudget, StepKind};
pub(crate) use trace::Trace;
pub use trace::{InspectLevel, LayerRouting};

use crate::backend::{Backend, BackendError, ResidentPart, RowSpan};
use crate::dispatch::ExpertDispatcher;
use crate::pages::{PageNeeds, SequenceCache};
use attention::{Attention, AttentionContext};
use layered_prefill::LayeredPrefill;
use mlp::Mlp;
use remoe_model::Multipliers;
use std::collections::BTreeMap;

/// Interface of the model for the engine.
pub(crate) trait Model: Send {
    /// Prepares the calling thread. The engine's thread calls this first.
    fn enter_thread(&self);

    /// Forwards the tokens of every segment and extends its KV cache, for which the caller has reserved pages.
    ///
    /// # Errors
    /// Fails if an operation fails or experts cannot be computed. The caches keep their length, so the caller can forward
    /// the same tokens again.
    fn forward(
        &mut self,
        segments: &mut [Segment<'_>],
        experts: &mut ExpertDispatcher,
        trace: Option<InspectLevel>,
    ) -> Result<Output, ForwardError>;

    /// Begins the layered prefill `id` of `segments`.
    ///
    /// Their rows go through the layers in steps, each a part of a layer, between which the engine can forward others. Each
    /// row's result has the same bits as that of [`forward`](Self::forward). The caches keep their length until
    /// [`finish_prefill`](Self::finish_prefill), and the caller must keep their pages reserved until then.
    ///
    /// # Errors
    /// Fails if an operation fails.
    fn begin_prefill(
        &mut self,
        id: u64,
        segments: &[Segment<'_>],
        trace: Option<InspectLevel>,
    ) -> Result<(), ForwardError>;

    /// Drops the rows of removed segments, if prefill `id` is between two layers. Returns true if there were any.
    ///
    /// # Errors
    /// Fails if an operation fails. The prefill is dropped then.
    fn drop_removed_rows(&mut self, id: u64) -> Result<bool, ForwardError>;

    /// Takes at least one step of prefill `id`, and more while `budget` allows. Returns true behind the last layer.
    ///
    /// # Errors
    /// Fails as [`forward`](Self::forward) does. The prefill is dropped then.
    fn advance_prefill(
        &mut self,
        id: u64,
        experts: &mut ExpertDispatcher,
        budget: &mut dyn StepBudget,
    ) -> Result<bool, ForwardError>;

    /// Removes segment `index` from prefill `id`: its pages are no longer written. Later segments get lower indices.
    fn remove_segment(&mut self, id: u64, index: usize);

    /// Ends prefill `id`, which is behind the last layer. Returns the outputs that the remaining `segments` want and
    /// extends their caches.
    ///
    /// # Errors
    /// Fails as [`forward`](Self::forward) does.
    fn finish_prefill(&mut self, id: u64, segments: &mut [Segment<'_>]) -> Result<Output, ForwardError>;

    /// Drops prefill `id`.
    fn drop_prefill(&mut self, id: u64);

    /// Copies the keys and values of page `from` to page `to`.
    ///
    /// # Errors
    /// Fails if there is no memory for `to`.
    fn copy_page(&mut self, from: usize, to: usize) -> Result<(), BackendError>;

    /// Returns the bytes of one KV cache page.
    fn page_bytes(&self) -> usize;

    /// Reserves memory for `count` pages, or for as many as the device can hold beside its workspace. Sequences have up to
    /// `positions` positions. Returns the number reserved.
    ///
    /// # Errors
    /// Fails if the device cannot hold a single page.
    fn reserve_pages(&mut self, count: usize, positions: usize) -> Result<usize, BackendError>;

    /// Returns the bytes of device memory that pages leave to iterations.
    fn workspace_bytes(&self) -> usize;

    /// Returns the pages that a sequence needs by its length.
    fn page_needs(&self) -> PageNeeds;

    /// Returns the elements of a hidden state.
    fn hidden(&self) -> usize;
}

/// Weights of the model outside of its routed experts, with the KV cache, on one device.
pub(crate) struct Transformer<B: Backend> {
    backend: B,
    pages: B::Pages,
    page_needs: PageNeeds,
    hidden: usize,
    vocab: usize,
    embedding: B::Embedding,
    /// True if the embedding and the output head share their memory.
    tied: bool,
    layers: Vec<Layer<B>>,
    positions: Positions<B>,
    norm: B::Norm,
    head: B::Linear,
    multipliers: Multipliers,
    /// Layered prefills under way, by id.
    prefills: BTreeMap<u64, LayeredPrefill<B>>,
}

/// Encoding of token positions.
enum Positions<B: Backend> {
    Rotary(B::Rope),
    /// Embedding with one row per position.
    Learned(B::Embedding),
}

struct Layer<B: Backend> {
    before_attention: B::Norm,
    attention: Attention<B>,
    before_mlp: B::Norm,
    mlp: Mlp<B>,
}

/// Rows of one sequence to forward.
pub(crate) struct Segment<'a> {
    /// Tokens to forward; their positions follow those in the cache.
    pub(crate) tokens: &'a [u32],
    pub(crate) cache: &'a mut SequenceCache,
    /// Outputs that the caller needs.
    pub(crate) wanted: OutputRows,
}

/// The rows of several segments, concatenated.
struct SegmentRows {
    tokens: Vec<u32>,
    positions: Vec<usize>,
    spans: Vec<RowSpan>,
}

impl SegmentRows {
    fn new(segments: &[Segment<'_>]) -> Self {
        let (mut tokens, mut positions) = (Vec::new(), Vec::new());
        let mut spans = Vec::with_capacity(segments.len());
        for segment in segments {
            let (first_row, rows, past) = (tokens.len(), segment.tokens.len(), segment.cache.length());
            tokens.extend_from_slice(segment.tokens);
            positions.extend(past..past + rows);
            spans.push(RowSpan { first_row, rows, past, page_tables: segment.cache.page_tables() });
        }
        Self { tokens, positions, spans }
    }
}

/// Outputs to compute of a segment's rows behind the last layer.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum OutputRows {
    None,
    /// Logits of the last row.
    Last,
    /// Logits of the last row, of which only this many of the largest need be exact.
    Largest(usize),
    /// Logits of all rows.
    All,
    /// Hidden states of all rows behind the final norm.
    States,
}

/// Outputs of one forward.
pub(crate) struct Output {
    /// Logits of the wanted rows, `vocab` per row. Logits that were not selected on the device are `f32::MIN`.
    pub(crate) logits: Vec<f32>,
    /// Logits per row.
    pub(crate) vocab: usize,
    /// Hidden states of the wanted rows behind the final norm, concatenated.
    pub(crate) states: Vec<f32>,
    /// Routing and final hidden states of all rows, if the caller asked for them.
    pub(crate) trace: Option<Trace>,
}

impl<B: Backend> Model for Transformer<B> {
    fn enter_thread(&self) {
        self.backend.enter_thread();
    }

    fn forward(
        &mut self,
        segments: &mut [Segment<'_>],
        experts: &mut ExpertDispatcher,
        trace: Option<InspectLevel>,
    ) -> Result<Output, ForwardError> {
        // The previous call may have failed within a layer.
        self.backend.enter_layer(None);
        let rows = SegmentRows::new(segments);
        let mut traced = trace.map(|_| Trace::default());
        experts.begin_iteration(rows.tokens.len());
        let x = self.forward_layers(rows, experts, traced.as_mut())?;
        self.output(&x, segments, traced, trace == Some(InspectLevel::Hidden))
    }

    fn begin_prefill(
        &mut self,
        id: u64,
        segments: &[Segment<'_>],
        trace: Option<InspectLevel>,
    ) -> Result<(), ForwardError> {
        let rows = SegmentRows::new(segments);
        let (x, angles) = self.embedded(&rows.tokens, &rows.positions)?;
        self.prefills.insert(id, LayeredPrefill::new(x, angles, rows.spans, trace));
        Ok(())
    }

    fn drop_removed_rows(&mut self, id: u64) -> Result<bool, ForwardError> {
        let Some(mut prefill) = self.prefills.remove(&id) else { return Ok(false) };
        let dropped = prefill.drop_removed_rows(&self.backend)?;
        self.prefills.insert(id, prefill);
        Ok(dropped)
    }

    fn advance_prefill(
        &mut self,
        id: u64,
        experts: &mut ExpertDispatcher,
        budget: &mut dyn StepBudget,
    ) -> Result<bool, ForwardError> {
        let Some(mut prefill) = self.prefills.remove(&id) else { return Ok(true) };
        // The number of rows stays the same until the next call.
        experts.begin_iteration(prefill.rows());
        let done = self.advance(&mut prefill, experts, budget);
        self.backend.enter_layer(None);
        let done = done?;
        self.prefills.insert(id, prefill);
        Ok(done)
    }

    fn remove_segment(&mut self, id: u64, index: usize) {
        if let Some(prefill) = self.prefills.get_mut(&id) {
            prefill.remove_segment(index);
        }
    }

    fn finish_prefill(&mut self, id: u64, segments: &mut [Segment<'_>]) -> Result<Output, ForwardError> {
        let missing = BackendError::Shape { what: "layered prefill", actual: 0, expected: 1 };
        let prefill = self.prefills.remove(&id).ok_or(missing)?;
        let (x, trace, hidden) = prefill.into_output();
        self.output(&x, segments, trace, hidden)
    }

    fn drop_prefill(&mut self, id: u64) {
        self.prefills.remove(&id);
    }

    fn copy_page(&mut self, from: usize, to: usize) -> Result<(), BackendError> {
        self.backend.copy_page(&mut self.pages, from, to)
    }

    fn page_bytes(&self) -> usize {
        B::page_bytes(&self.pages)
    }

    fn reserve_pages(&mut self, count: usize, positions: usize) -> Result<usize, BackendError> {
        self.backend.reserve_pages(&mut self.pages, count, positions)
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

/// Multiplies `x` by `factor`, which is 1 for most models.
fn scaled<B: Backend>(ops: &B, x: B::Tensor, factor: f64) -> Result<B::Tensor, BackendError> {
    if factor == 1.0 { Ok(x) } else { ops.scale(x, factor) }
}

impl<B: Backend> Transformer<B> {
    /// Returns the bytes of memory that the weights take, without routed experts.
    pub(crate) fn weight_bytes(&self) -> usize {
        let positions = match &self.positions {
            Positions::Rotary(_) => 0,
            Positions::Learned(table) => table.bytes(),
        };
        let embedding = if self.tied { 0 } else { self.embedding.bytes() };
        let layers: usize = self.layers.iter().map(Layer::weight_bytes).sum();
        layers + positions + self.norm.bytes() + self.head.bytes() + embedding
    }

    /// Embeds `tokens`. Returns the rows before the first layer, and their rotary angles if positions are rotary.
    fn embedded(
        &self,
        tokens: &[u32],
        positions: &[usize],
    ) -> Result<(B::Tensor, Option<B::Angles>), ForwardError> {
        let ops = &self.backend;
        let x = scaled(ops, ops.embed(&self.embedding, tokens)?, self.multipliers.embedding)?;
        match &self.positions {
            Positions::Rotary(rope) => Ok((x, Some(ops.angles(rope, positions)?))),
            Positions::Learned(table) => {
                // Contexts are shorter than 2^31 positions.
                let positions: Vec<u32> = positions.iter().map(|&position| position as u32).collect();
                Ok((ops.add(x, &ops.embed(table, &positions)?)?, None))
            }
        }
    }

    /// Takes the rows through all layers.
    fn forward_layers(
        &mut self,
        rows: SegmentRows,
        experts: &mut ExpertDispatcher,
        mut trace: Option<&mut Trace>,
    ) -> Result<B::Tensor, ForwardError> {
        let (mut x, angles) = self.embedded(&rows.tokens, &rows.positions)?;
        let ops = &self.backend;
        let residual = self.multipliers.residual;
        let spans = ops.prepare_spans(&self.pages, rows.spans)?;
        let mut context =
            AttentionContext { ops, pages: &mut self.pages, angles: angles.as_ref(), spans: &spans };
        for (id, layer) in self.layers.iter().enumerate() {
            ops.enter_layer(Some(id));
            let normed = ops.norm(&layer.before_attention, &x)?;
            let output = layer.attention.forward(id, &normed, &mut context)?;
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

    /// Computes the outputs that the segments want of the rows `x` behind the last layer, and extends their caches.
    fn output(
        &self,
        x: &B::Tensor,
        segments: &mut [Segment<'_>],
        mut trace: Option<Trace>,
        hidden: bool,
    ) -> Result<Output, ForwardError> {
        let (mut wanted, mut states, mut first_row) = (Vec::new(), Vec::new(), 0);
        for segment in segments.iter() {
            let rows = first_row..first_row + segment.tokens.len();
            first_row = rows.end;
            match segment.wanted {
                OutputRows::None => (),
                OutputRows::Last => wanted.extend(rows.last().map(|row| LogitsRow { row, largest: None })),
                OutputRows::Largest(count) => {
                    wanted.extend(rows.last().map(|row| LogitsRow { row, largest: Some(count) }));
                }
                OutputRows::All => wanted.extend(rows.map(|row| LogitsRow { row, largest: None })),
                OutputRows::States => states.extend(rows),
            }
        }
        if let Some(trace) = trace.as_mut().filter(|_| hidden) {
            trace.hidden = self.backend.host_bytes(x)?.into_owned();
        }
        let logits = self.logits(x, &wanted)?;
        let states = match states.as_slice() {
            [] => Vec::new(),
            rows => {
                let ops = &self.backend;
                ops.host_floats(&ops.norm(&self.norm, &ops.select_rows(x, rows)?)?)?
            }
        };
        // Nothing below can fail.
        for segment in segments {
            segment.cache.advance(segment.tokens.len());
        }
        Ok(Output { logits, vocab: self.vocab, states, trace })
    }

    /// Computes the logits of rows of `x`, one row of `vocab` logits each.
    fn logits(&self, x: &B::Tensor, wanted: &[LogitsRow]) -> Result<Vec<f32>, ForwardError> {
        if wanted.is_empty() {
            return Ok(Vec::new());
        }
        let (ops, divisor) = (&self.backend, self.multipliers.logits_divisor as f32);
        let divided = |mut logits: Vec<f32>| {
            if divisor != 1.0 {
                logits.iter_mut().for_each(|logit| *logit /= divisor);
            }
            logits
        };
        let rows: Vec<usize> = wanted.iter().map(|wanted| wanted.row).collect();
        let logits = ops.linear(&self.head, &ops.norm(&self.norm, &ops.select_rows(x, &rows)?)?)?;
        let count = wanted.iter().filter_map(|wanted| wanted.largest).max();
        let Some(count) = count.filter(|_| B::SELECTS_LOGITS) else {
            return Ok(divided(ops.host_floats(&logits)?));
        };
        let indices = |selected: bool| -> Vec<usize> {
            let rows = wanted.iter().enumerate().filter(|(_, wanted)| wanted.largest.is_some() == selected);
            rows.map(|(index, _)| index).collect()
        };
        let (selected_rows, whole_rows) = (indices(true), indices(false));
        let mut all = vec![f32::MIN; wanted.len() * self.vocab];
        let count = count.min(self.vocab);
        let (tokens, values) = ops.largest_logits(&ops.select_rows(&logits, &selected_rows)?, count)?;
        let values = divided(values);
        let selected = tokens.chunks_exact(count).zip(values.chunks_exact(count));
        for (&index, (tokens, values)) in selected_rows.iter().zip(selected) {
            for (&token, &value) in tokens.iter().zip(values) {
                if let Some(logit) = all[index * self.vocab..][..self.vocab].get_mut(token as usize) {
                    *logit = value;
                }
            }
        }
        if !whole_rows.is_empty() {
            let rows = divided(ops.host_floats(&ops.select_rows(&logits, &whole_rows)?)?);
            for (&index, row) in whole_rows.iter().zip(rows.chunks_exact(self.vocab)) {
                all[index * self.vocab..][..self.vocab].copy_from_slice(row);
            }
        }
        Ok(all)
    }
}

/// Row whose logits are wanted.
struct LogitsRow {
    row: usize,
    /// If set, only this many of the largest logits need be exact.
    largest: Option<usize>,
}
