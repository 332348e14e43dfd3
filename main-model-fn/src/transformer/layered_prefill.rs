//! Layered prefill: takes the rows of prompts through the layers in steps that fit between decode iterations.
//!
//! A prefill keeps the rows' hidden states and a cursor: the layer, and the stage within it. A step is a block of rows
//! (attention, router, dense MLP, sum) or some experts with all of their rows. So an expert's weights are read once for
//! all rows, however short the steps are; chunked prefill would read them again for every chunk. Every row has the same
//! bits as in one whole forward, because no operation depends on the other rows.

use super::attention::AttentionContext;
use super::mlp::{Mlp, layer_routing};
use super::{ForwardError, InspectLevel, Layer, Trace, Transformer, scaled};
use crate::backend::{Backend, PAGE_POSITIONS, RowSpan};
use crate::dispatch::{ExpertDispatcher, LayerCall, Portions, RemoteUnits};
use crate::routing::Routed;
use std::ops::Range;
use std::sync::Arc;
use std::time::{Duration, Instant};

/// Kind of a step. The engine measures the cost of each kind separately.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub(crate) enum StepKind {
    /// Attention of a block of rows. One unit is one row that attends to one position.
    Attention,
    /// Dense MLP, or router and shared experts, of a block of rows. See [`row_units`].
    Rows,
    /// Remote experts, and local ones meanwhile. One unit is one row of a remote expert.
    RemoteExperts,
    /// Sum over the experts for a block of rows. See [`row_units`].
    Sum,
}

/// Time that the steps of a prefill may take.
pub(crate) trait StepBudget {
    /// Returns the largest size of the next step of `kind`, which cannot be interrupted; 0 if the prefill must stop.
    fn max_units(&mut self, kind: StepKind) -> u64;

    /// Reports if the prefill must stop. Local experts are computed until then, regardless of their number.
    fn is_over(&mut self) -> bool;

    /// Records that a step of `units` units took `time`.
    fn record(&mut self, kind: StepKind, units: u64, time: Duration);
}

/// A layered prefill.
pub(super) struct LayeredPrefill<B: Backend> {
    /// Hidden states, rows x hidden.
    x: B::Tensor,
    angles: Option<B::Angles>,
    spans: Vec<RowSpan>,
    /// Blocks of rows with their prepared spans. Most layers use the same blocks.
    prepared: Vec<(Range<usize>, B::PreparedSpans)>,
    /// True for each span whose sequence was removed.
    removed: Vec<bool>,
    layer: usize,
    stage: LayerStage,
    trace: Option<Trace>,
    traces_hidden: bool,
}

/// Part of the layer that is under way. The first number is the first row that is not done.
enum LayerStage {
    Attention(usize),
    Dense(usize),
    /// Router, with the hidden states and routing of the rows so far.
    Route(usize, Vec<u8>, ExpertInputs),
    Experts(ExpertInputs, Portions),
    Sum(usize, ExpertInputs, Portions),
}

/// Inputs of the experts of a layer.
#[derive(Default)]
struct ExpertInputs {
    /// rows x hidden, compute dtype, little endian. Empty until all rows are routed.
    inputs: Arc<[u8]>,
    routed: Routed,
    /// Shared contribution: rows x hidden, in the same form; empty if it is not added on the host.
    shared: Vec<u8>,
}

impl ExpertInputs {
    fn call(&self, layer: usize) -> LayerCall<'_> {
        LayerCall { layer, inputs: &self.inputs, routed: &self.routed }
    }
}

/// Fewest rows of a block, unless fewer are left: smaller blocks would read the weights too often.
const MIN_BLOCK_ROWS: usize = 8;
/// Rows of a block. The results between two operations then stay in the CPU's caches.
const MAX_BLOCK_ROWS: usize = 512;
/// Rows whose computation takes as long as reading the weights of a block.
const READ_ROWS: u64 = 16;
/// Cost of a row outside of attention scores, in positions that it could attend to in the same time.
const ROW_POSITIONS: u64 = 2048;
/// Most blocks whose prepared spans are kept for the next layer.
const MAX_PREPARED_BLOCKS: usize = 8;

impl<B: Backend> LayeredPrefill<B> {
    pub(super) fn new(
        x: B::Tensor,
        angles: Option<B::Angles>,
        spans: Vec<RowSpan>,
        trace: Option<InspectLevel>,
    ) -> Self {
        let (removed, traces_hidden) = (vec![false; spans.len()], trace == Some(InspectLevel::Hidden));
        let trace = trace.map(|_| Trace::default());
        Self {
            x,
            angles,
            spans,
            prepared: Vec::new(),
            removed,
            layer: 0,
            stage: LayerStage::Attention(0),
            trace,
            traces_hidden,
        }
    }

    /// Returns the number of rows, those of removed sequences included.
    pub(super) fn rows(&self) -> usize {
        self.spans.last().map_or(0, RowSpan::end_row)
    }

    /// Removes the sequence with index `index` among those that were not removed.
    pub(super) fn remove_segment(&mut self, index: usize) {
        let mut present = self.removed.iter_mut().filter(|removed| !**removed);
        if let Some(removed) = present.nth(index) {
            *removed = true;
        }
    }

    /// Returns the rows behind the last layer, their trace, and if the trace includes hidden states.
    pub(super) fn into_output(self) -> (B::Tensor, Option<Trace>, bool) {
        (self.x, self.trace, self.traces_hidden)
    }

    /// Drops the rows of removed sequences, if the prefill is between two layers. Returns true if there were any.
    pub(super) fn drop_removed_rows(&mut self, ops: &B) -> Result<bool, ForwardError> {
        if !self.must_drop_rows() {
            return Ok(false);
        }
        let (mut left, mut spans) = (Vec::new(), Vec::new());
        for (mut span, _) in
            std::mem::take(&mut self.spans).into_iter().zip(&self.removed).filter(|(_, removed)| !**removed)
        {
            let rows = span.first_row..span.end_row();
            span.first_row = left.len();
            left.extend(rows);
            spans.push(span);
        }
        (self.removed, self.spans) = (vec![false; spans.len()], spans);
        self.prepared.clear();
        self.x = ops.select_rows(&self.x, &left)?;
        if let Some(angles) = &self.angles {
            self.angles = Some(ops.select_angles(angles, &left)?);
        }
        for layer in self.trace.iter_mut().flat_map(|trace| &mut trace.routing) {
            layer.tokens = left.iter().map(|&row| std::mem::take(&mut layer.tokens[row])).collect();
        }
        Ok(true)
    }

    /// Reports if the prefill is between two layers and has rows of removed sequences.
    fn must_drop_rows(&self) -> bool {
        matches!(self.stage, LayerStage::Attention(0)) && self.removed.contains(&true)
    }

    /// Returns the longest block of rows for attention from row `next` on, without rows of removed sequences.
    fn attention_block(&self, next: usize) -> Option<Range<usize>> {
        let is_present = |index: &usize| !self.removed[*index];
        let first =
            (0..self.spans.len()).filter(is_present).find(|&index| next < self.spans[index].end_row())?;
        let last = (first..self.spans.len()).take_while(is_present).last()?;
        Some(next.max(self.spans[first].first_row)..self.spans[last].end_row())
    }

    /// Returns the parts of spans within `rows`, with row indices relative to its start.
    fn spans_within(&self, rows: &Range<usize>) -> Vec<RowSpan> {
        let part = |span: &RowSpan| {
            let (from, to) = (span.first_row.max(rows.start), span.end_row().min(rows.end));
            (from < to).then(|| {
                let past = span.past + from - span.first_row;
                let pages = (past + to - from).div_ceil(PAGE_POSITIONS);
                let page_table = |ids: &Vec<usize>| ids[..pages.min(ids.len())].to_vec();
                let page_tables = span.page_tables.iter().map(page_table).collect();
                RowSpan { first_row: from - rows.start, rows: to - from, past, page_tables }
            })
        };
        self.spans.iter().filter_map(part).collect()
    }

    /// Prepares the spans of `rows`, unless an earlier layer did. Returns their index in `prepared`.
    fn prepare(&mut self, ops: &B, pages: &B::Pages, rows: &Range<usize>) -> Result<usize, ForwardError> {
        if let Some(index) = self.prepared.iter().position(|(block, _)| block == rows) {
            return Ok(index);
        }
        if self.prepared.len() == MAX_PREPARED_BLOCKS {
            self.prepared.clear();
        }
        ops.enter_layer(None);
        self.prepared.push((rows.clone(), ops.prepare_spans(pages, self.spans_within(rows))?));
        ops.enter_layer(Some(self.layer));
        Ok(self.prepared.len() - 1)
    }

    /// Returns the number of positions before row `row` in its sequence.
    fn past(&self, row: usize) -> usize {
        let span = self.spans.iter().find(|span| row < span.end_row());
        span.map_or(0, |span| span.past + row.saturating_sub(span.first_row))
    }

    /// Moves to the next layer and returns its first stage.
    fn next_layer(&mut self) -> LayerStage {
        self.layer += 1;
        LayerStage::Attention(0)
    }
}

/// Returns the most rows, of `left`, that take at most `max_units` units by `units`.
///
/// If not even the fewest rows of a block fit, returns 0, or these fewest rows if `forced`.
fn rows_within(max_units: u64, left: usize, forced: bool, units: impl Fn(usize) -> u64) -> usize {
    let least = left.min(MIN_BLOCK_ROWS);
    if units(least) > max_units {
        return if forced { least } else { 0 };
    }
    let (mut fits, mut above) = (least, left.min(MAX_BLOCK_ROWS) + 1);
    while fits + 1 < above {
        let middle = fits.midpoint(above);
        if units(middle) <= max_units { fits = middle } else { above = middle }
    }
    fits
}

/// Returns the units of a block of `rows` in steps of [`StepKind::Rows`] and [`StepKind::Sum`].
fn row_units(rows: usize) -> u64 {
    READ_ROWS + rows as u64
}

impl<B: Backend> Transformer<B> {
    /// Takes at least one step of `prefill`, and more while `budget` allows, but none while it must drop rows. Returns true
    /// behind the last layer.
    pub(super) fn advance(
        &mut self,
        prefill: &mut LayeredPrefill<B>,
        experts: &mut ExpertDispatcher,
        budget: &mut dyn StepBudget,
    ) -> Result<bool, ForwardError> {
        let mut forced = true;
        loop {
            let started = Instant::now();
            if prefill.must_drop_rows() {
                return Ok(false);
            }
            if prefill.layer == self.layers.len() {
                return Ok(true);
            }
            self.backend.enter_layer(Some(prefill.layer));
            let stage = std::mem::replace(&mut prefill.stage, LayerStage::Attention(0));
            let (stage, step) = match stage {
                LayerStage::Attention(next) => self.attention_step(prefill, next, forced, budget)?,
                LayerStage::Dense(next) => self.dense_step(prefill, next, forced, budget)?,
                LayerStage::Route(next, rows, inputs) => {
                    self.route_step(prefill, next, (rows, inputs), experts, forced, budget)?
                }
                LayerStage::Experts(inputs, portions) => {
                    expert_step(prefill.layer, inputs, portions, experts, forced, budget)?
                }
                LayerStage::Sum(next, inputs, portions) => {
                    self.sum_step(prefill, next, (inputs, portions), experts, forced, budget)?
                }
            };
            prefill.stage = stage;
            match step {
                StepOutcome::BudgetSpent => return Ok(false),
                StepOutcome::Taken(kind, units) => budget.record(kind, units, started.elapsed()),
            }
            forced = false;
        }
    }

    fn attention_step(
        &mut self,
        prefill: &mut LayeredPrefill<B>,
        next: usize,
        forced: bool,
        budget: &mut dyn StepBudget,
    ) -> Result<(LayerStage, StepOutcome), ForwardError> {
        let Some(block) = prefill.attention_block(next) else {
            let stage = self.stage_after_attention(prefill.layer);
            return Ok((stage, StepOutcome::Taken(StepKind::Attention, 0)));
        };
        let past = prefill.past(block.start) as u64;
        let units = |rows: usize| row_units(rows) * (ROW_POSITIONS + past + rows as u64 / 2);
        let rows = rows_within(budget.max_units(StepKind::Attention), block.len(), forced, units);
        if rows == 0 {
            return Ok((LayerStage::Attention(next), StepOutcome::BudgetSpent));
        }
        let block = block.start..block.start + rows;
        let (ops, layer) = (&self.backend, &self.layers[prefill.layer]);
        let prepared = prefill.prepare(ops, &self.pages, &block)?;
        let indices: Vec<usize> = block.clone().collect();
        let angles = prefill.angles.as_ref();
        let angles = angles.map(|angles| ops.select_angles(angles, &indices)).transpose()?;
        let normed = ops.norm(&layer.before_attention, &ops.select_rows(&prefill.x, &indices)?)?;
        let spans = &prefill.prepared[prepared].1;
        let mut context = AttentionContext { ops, pages: &mut self.pages, angles: angles.as_ref(), spans };
        let output = layer.attention.forward(prefill.layer, &normed, &mut context)?;
        let output = scaled(&self.backend, output, self.multipliers.residual)?;
        self.backend.add_rows(&mut prefill.x, block.start, &output)?;
        let stage = match prefill.attention_block(block.end) {
            Some(_) => LayerStage::Attention(block.end),
            None => self.stage_after_attention(prefill.layer),
        };
        Ok((stage, StepOutcome::Taken(StepKind::Attention, units(rows))))
    }

    fn stage_after_attention(&self, layer: usize) -> LayerStage {
        match &self.layers[layer].mlp {
            Mlp::Dense(_) => LayerStage::Dense(0),
            Mlp::Moe(_) => LayerStage::Route(0, Vec::new(), ExpertInputs::default()),
        }
    }

    /// Returns the rows of a step from `next` on, normed for the feed-forward part; `None` if the budget is spent.
    fn normed_rows(
        &self,
        prefill: &LayeredPrefill<B>,
        next: usize,
        forced: bool,
        budget: &mut dyn StepBudget,
    ) -> Result<NormedRows<B>, ForwardError> {
        let max_units = budget.max_units(StepKind::Rows);
        let rows = rows_within(max_units, prefill.rows() - next, forced, row_units);
        if rows == 0 {
            return Ok(None);
        }
        let indices: Vec<usize> = (next..next + rows).collect();
        let x = self.backend.select_rows(&prefill.x, &indices)?;
        let normed = self.backend.norm(&self.layers[prefill.layer].before_mlp, &x)?;
        Ok(Some((next..next + rows, normed)))
    }

    fn dense_step(
        &self,
        prefill: &mut LayeredPrefill<B>,
        next: usize,
        forced: bool,
        budget: &mut dyn StepBudget,
    ) -> Result<(LayerStage, StepOutcome), ForwardError> {
        let Layer { mlp: Mlp::Dense(network), .. } = &self.layers[prefill.layer] else {
            return Ok((
                LayerStage::Route(0, Vec::new(), ExpertInputs::default()),
                StepOutcome::Taken(StepKind::Rows, 0),
            ));
        };
        let Some((rows, normed)) = self.normed_rows(prefill, next, forced, budget)? else {
            return Ok((LayerStage::Dense(next), StepOutcome::BudgetSpent));
        };
        let ops = &self.backend;
        let output = scaled(ops, ops.gated(network, &normed)?, self.multipliers.residual)?;
        ops.add_rows(&mut prefill.x, rows.start, &output)?;
        let is_last = rows.end == prefill.rows();
        let stage = if is_last { prefill.next_layer() } else { LayerStage::Dense(rows.end) };
        Ok((stage, StepOutcome::Taken(StepKind::Rows, row_units(rows.len()))))
    }

    fn route_step(
        &self,
        prefill: &mut LayeredPrefill<B>,
        next: usize,
        (mut hidden, mut inputs): (Vec<u8>, ExpertInputs),
        experts: &ExpertDispatcher,
        forced: bool,
        budget: &mut dyn StepBudget,
    ) -> Result<(LayerStage, StepOutcome), ForwardError> {
        let Layer { mlp: Mlp::Moe(moe), .. } = &self.layers[prefill.layer] else {
            return Ok((LayerStage::Dense(0), StepOutcome::Taken(StepKind::Rows, 0)));
        };
        let Some((rows, normed)) = self.normed_rows(prefill, next, forced, budget)? else {
            return Ok((LayerStage::Route(next, hidden, inputs), StepOutcome::BudgetSpent));
        };
        let (bytes, routed) = self.backend.route(&moe.router, &normed)?;
        hidden.extend_from_slice(&bytes);
        inputs.routed.append(routed);
        if let Some(shared) = moe.shared_on_device(&self.backend, &normed)? {
            // Attention has read these rows, and the sum over routed experts comes later.
            let shared = scaled(&self.backend, shared, self.multipliers.residual)?;
            self.backend.add_rows(&mut prefill.x, rows.start, &shared)?;
        }
        moe.with_shared_on_host(&self.backend, &normed, rows.len(), |shared| {
            inputs.shared.extend_from_slice(shared.unwrap_or_default());
        })?;
        let stage = if rows.end < prefill.rows() {
            LayerStage::Route(rows.end, hidden, inputs)
        } else {
            if let Some(trace) = &mut prefill.trace {
                trace.routing.push(layer_routing(prefill.layer, &inputs.routed));
            }
            inputs.inputs = hidden.into();
            let portions = experts.begin_portions(&inputs.call(prefill.layer), inputs.inputs.clone());
            LayerStage::Experts(inputs, portions)
        };
        Ok((stage, StepOutcome::Taken(StepKind::Rows, row_units(rows.len()))))
    }

    fn sum_step(
        &self,
        prefill: &mut LayeredPrefill<B>,
        next: usize,
        (inputs, portions): (ExpertInputs, Portions),
        experts: &ExpertDispatcher,
        forced: bool,
        budget: &mut dyn StepBudget,
    ) -> Result<(LayerStage, StepOutcome), ForwardError> {
        let max_units = budget.max_units(StepKind::Sum);
        let rows = rows_within(max_units, prefill.rows() - next, forced, row_units);
        if rows == 0 {
            return Ok((LayerStage::Sum(next, inputs, portions), StepOutcome::BudgetSpent));
        }
        let (rows, row_bytes) = (next..next + rows, inputs.inputs.len() / prefill.rows());
        let shared = inputs.shared.get(rows.start * row_bytes..rows.end * row_bytes);
        let (call, width) = (inputs.call(prefill.layer), self.hidden);
        let output: B::Tensor = self.backend.tensor_from_host(rows.len(), width, |output| {
            experts
                .reduce_portions(&call, &portions, rows.clone(), shared, output)
                .map_err(ForwardError::from)
        })?;
        let output = scaled(&self.backend, output, self.multipliers.residual)?;
        self.backend.add_rows(&mut prefill.x, rows.start, &output)?;
        let stage = if rows.end < prefill.rows() {
            LayerStage::Sum(rows.end, inputs, portions)
        } else {
            prefill.next_layer()
        };
        Ok((stage, StepOutcome::Taken(StepKind::Sum, row_units(rows.len()))))
    }
}

/// Rows and their normed hidden states; `None` if the budget is spent.
type NormedRows<B> = Option<(Range<usize>, <B as Backend>::Tensor)>;

enum StepOutcome {
    /// The step does not fit into the budget and was not taken.
    BudgetSpent,
    /// Kind and units of the step that was taken.
    Taken(StepKind, u64),
}

fn expert_step(
    layer: usize,
    inputs: ExpertInputs,
    mut portions: Portions,
    experts: &mut ExpertDispatcher,
    forced: bool,
    budget: &mut dyn StepBudget,
) -> Result<(LayerStage, StepOutcome), ForwardError> {
    let call = inputs.call(layer);
    experts.follow_placement(&call, &mut portions);
    let remote_units = if portions.has_remote() { budget.max_units(StepKind::RemoteExperts) } else { 0 };
    let must_stop = if portions.has_remote() { remote_units == 0 } else { budget.is_over() };
    if must_stop && !forced {
        return Ok((LayerStage::Experts(inputs, portions), StepOutcome::BudgetSpent));
    }
    let RemoteUnits { units, is_hidden } =
        experts.compute_portion(&call, &mut portions, remote_units, &mut || budget.is_over())?;
    let stage = match portions.is_done() {
        true => LayerStage::Sum(0, inputs, portions),
        false => LayerStage::Experts(inputs, portions),
    };
    // If answers arrived during the local work, they took less than the step. The doubled units make the next portion
    // larger until remote functions take longer than local experts.
    let units = if is_hidden { 2 * units } else { units };
    Ok((stage, StepOutcome::Taken(StepKind::RemoteExperts, units)))
}
