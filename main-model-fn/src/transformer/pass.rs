//! Layered prefill: the rows of prompts on their way through the layers, in steps that fit between decode iterations.
//!
//! A pass keeps the rows' hidden states and a cursor: the layer, and what has been done of it. A step is a block of
//! rows (attention, router, dense network, sum) or some experts with all of their rows, so that the weights of an
//! expert are read once for all rows of the pass, however short the steps are. Chunked prefill would read them again
//! for every chunk. Every row's bits are those of a forward in one piece: no operation depends on the rows beside it.

use super::attention::AttentionContext;
use super::mlp::{Mlp, recorded};
use super::{ForwardError, InspectLevel, Layer, Trace, Transformer, scaled};
use crate::backend::{Backend, PAGE_POSITIONS, Span};
use crate::dispatch::{Experts, LayerCall, Portions, RemoteUnits};
use crate::routing::Routed;
use std::ops::Range;
use std::sync::Arc;
use std::time::{Duration, Instant};

/// Kinds of steps; each has a pace of its own.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub(crate) enum StepKind {
    /// Attention of a block of rows. A unit is a row and a position that it attends to.
    Attention,
    /// A dense network, or the router and shared experts, of a block of rows.
    Rows,
    /// Remote experts, with local ones meanwhile. A unit is a row of a remote expert.
    RemoteExperts,
    /// The sum over the experts of a block of rows.
    Sum,
}

/// The time that the steps of a pass may take.
pub(crate) trait StepBudget {
    /// Most units of the next step of this kind; 0: the pass is to stop here. Such a step is not interrupted.
    fn units(&mut self, kind: StepKind) -> u64;

    /// True once the pass is to stop. Local experts are computed until then, whatever they take.
    fn is_over(&mut self) -> bool;

    /// A step of so many units has taken so long.
    fn took(&mut self, kind: StepKind, units: u64, time: Duration);
}

/// A layered prefill.
pub(super) struct Pass<B: Backend> {
    /// Hidden states, rows x hidden.
    x: B::Tensor,
    angles: Option<B::Angles>,
    spans: Vec<Span>,
    /// Blocks of rows that attention of an earlier layer took, with their spans: most layers take the same ones.
    prepared: Vec<(Range<usize>, B::Spans)>,
    /// True for each span whose sequence has left.
    gone: Vec<bool>,
    layer: usize,
    stage: Stage,
    trace: Option<Trace>,
    hidden: bool,
}

/// The part of the layer that is under way, with the first row that is not done.
enum Stage {
    Attention(usize),
    Dense(usize),
    /// With the experts' inputs so far.
    Route(usize, Vec<u8>, ExpertInputs),
    Experts(ExpertInputs, Portions),
    Sum(usize, ExpertInputs, Portions),
}

/// Inputs of the experts of a layer.
#[derive(Default)]
struct ExpertInputs {
    /// rows x hidden elements, compute dtype. Empty until all of them are routed.
    inputs: Arc<[u8]>,
    routed: Routed,
    /// Rows of the shared experts, in the same form; empty where there are none.
    besides: Vec<u8>,
}

impl ExpertInputs {
    fn call(&self, layer: usize) -> LayerCall<'_> {
        LayerCall { layer, inputs: &self.inputs, routed: &self.routed }
    }
}

/// Rows that weights are not read for again, if there are more.
const LEAST_ROWS: usize = 8;
/// Reading the weights of a block takes as long as computing so many rows.
const READ_ROWS: u64 = 16;
/// Cost of a row outside of attention's scores, in positions that it could attend to meanwhile.
const ROW_POSITIONS: u64 = 2048;
/// Blocks whose spans are kept for the next layer.
const MOST_PREPARED: usize = 8;
/// Rows of a block where time does not bound it: what is computed between operations stays in the caches.
const MOST_ROWS: usize = 512;

impl<B: Backend> Pass<B> {
    pub(super) fn new(
        x: B::Tensor,
        angles: Option<B::Angles>,
        spans: Vec<Span>,
        trace: Option<InspectLevel>,
    ) -> Self {
        let (gone, hidden) = (vec![false; spans.len()], trace == Some(InspectLevel::Hidden));
        let trace = trace.map(|_| Trace::default());
        Self {
            x,
            angles,
            spans,
            prepared: Vec::new(),
            gone,
            layer: 0,
            stage: Stage::Attention(0),
            trace,
            hidden,
        }
    }

    pub(super) fn rows(&self) -> usize {
        self.spans.last().map_or(0, |last| last.first + last.rows)
    }

    /// The sequence of the `index`th span that has not left leaves.
    pub(super) fn leave(&mut self, index: usize) {
        let mut here = self.gone.iter_mut().filter(|gone| !**gone);
        if let Some(gone) = here.nth(index) {
            *gone = true;
        }
    }

    /// The rows behind the last layer, with what was recorded of them, and whether their hidden states are.
    pub(super) fn ended(self) -> (B::Tensor, Option<Trace>, bool) {
        (self.x, self.trace, self.hidden)
    }

    /// Drops, between two layers, the rows of sequences that have left. Returns true if there were any.
    pub(super) fn close_gaps(&mut self, ops: &B) -> Result<bool, ForwardError> {
        if !self.has_gaps() {
            return Ok(false);
        }
        let (mut left, mut spans) = (Vec::new(), Vec::new());
        for (mut span, _) in
            std::mem::take(&mut self.spans).into_iter().zip(&self.gone).filter(|(_, gone)| !**gone)
        {
            let rows = span.first..span.first + span.rows;
            span.first = left.len();
            left.extend(rows);
            spans.push(span);
        }
        (self.gone, self.spans) = (vec![false; spans.len()], spans);
        self.prepared.clear();
        self.x = ops.rows(&self.x, &left)?;
        if let Some(angles) = &self.angles {
            self.angles = Some(ops.angles_of(angles, &left)?);
        }
        for layer in self.trace.iter_mut().flat_map(|trace| &mut trace.routing) {
            layer.tokens = left.iter().map(|&row| std::mem::take(&mut layer.tokens[row])).collect();
        }
        Ok(true)
    }

    /// True between two layers if it has rows of sequences that have left.
    fn has_gaps(&self) -> bool {
        matches!(self.stage, Stage::Attention(0)) && self.gone.contains(&true)
    }

    /// Where the next block of rows for attention begins and must end: it has rows of sequences that have not left.
    fn block(&self, next: usize) -> Option<Range<usize>> {
        let here = |index: &usize| !self.gone[*index];
        let first = (0..self.spans.len()).filter(here).find(|&index| {
            let span = &self.spans[index];
            next < span.first + span.rows
        })?;
        let last = (first..self.spans.len()).take_while(here).last()?;
        Some(next.max(self.spans[first].first)..self.spans[last].first + self.spans[last].rows)
    }

    /// The spans of `rows`, counted from the first of them.
    fn spans_of(&self, rows: &Range<usize>) -> Vec<Span> {
        let part = |span: &Span| {
            let (from, to) = (span.first.max(rows.start), (span.first + span.rows).min(rows.end));
            (from < to).then(|| {
                let past = span.past + from - span.first;
                let pages = (past + to - from).div_ceil(PAGE_POSITIONS);
                let table = |ids: &Vec<usize>| ids[..pages.min(ids.len())].to_vec();
                let tables = span.tables.iter().map(table).collect();
                Span { first: from - rows.start, rows: to - from, past, tables }
            })
        };
        self.spans.iter().filter_map(part).collect()
    }

    /// Returns where the spans of `rows` are among those that are prepared.
    fn prepare(&mut self, ops: &B, pages: &B::Pages, rows: &Range<usize>) -> Result<usize, ForwardError> {
        if let Some(at) = self.prepared.iter().position(|(block, _)| block == rows) {
            return Ok(at);
        }
        if self.prepared.len() == MOST_PREPARED {
            self.prepared.clear();
        }
        ops.enter_layer(None);
        self.prepared.push((rows.clone(), ops.spans(pages, self.spans_of(rows))?));
        ops.enter_layer(Some(self.layer));
        Ok(self.prepared.len() - 1)
    }

    /// Positions before row `row`.
    fn past(&self, row: usize) -> usize {
        let span = self.spans.iter().find(|span| row < span.first + span.rows);
        span.map_or(0, |span| span.past + row.saturating_sub(span.first))
    }
}

/// Most rows, of `left`, whose `units` are not above `most`; where that is fewer than the least that are worth a step,
/// none, unless `forced`.
fn rows_within(most: u64, left: usize, forced: bool, units: impl Fn(usize) -> u64) -> usize {
    let least = left.min(LEAST_ROWS);
    if units(least) > most {
        return if forced { least } else { 0 };
    }
    let (mut fits, mut above) = (least, left.min(MOST_ROWS) + 1);
    while fits + 1 < above {
        let middle = fits.midpoint(above);
        if units(middle) <= most { fits = middle } else { above = middle }
    }
    fits
}

/// Units of a block of `rows` in steps of [`StepKind::Rows`] and [`StepKind::Sum`].
fn row_units(rows: usize) -> u64 {
    READ_ROWS + rows as u64
}

impl<B: Backend> Transformer<B> {
    /// Takes steps of `pass` while `budget` allows, one at least, but none while it has gaps. True behind the last
    /// layer.
    pub(super) fn advance(
        &mut self,
        pass: &mut Pass<B>,
        experts: &mut Experts,
        budget: &mut dyn StepBudget,
    ) -> Result<bool, ForwardError> {
        let mut forced = true;
        loop {
            let started = Instant::now();
            if pass.has_gaps() {
                return Ok(false);
            }
            if pass.layer == self.layers.len() {
                return Ok(true);
            }
            self.ops.enter_layer(Some(pass.layer));
            let stage = std::mem::replace(&mut pass.stage, Stage::Attention(0));
            let (stage, step) = match stage {
                Stage::Attention(next) => self.attention_step(pass, next, forced, budget)?,
                Stage::Dense(next) => self.dense_step(pass, next, forced, budget)?,
                Stage::Route(next, rows, inputs) => {
                    self.route_step(pass, next, (rows, inputs), experts, forced, budget)?
                }
                Stage::Experts(inputs, portions) => {
                    expert_step(pass.layer, inputs, portions, experts, forced, budget)?
                }
                Stage::Sum(next, inputs, portions) => {
                    self.sum_step(pass, next, (inputs, portions), experts, forced, budget)?
                }
            };
            pass.stage = stage;
            match step {
                Step::None => return Ok(false),
                Step::Taken(kind, units) => budget.took(kind, units, started.elapsed()),
            }
            forced = false;
        }
    }

    fn attention_step(
        &mut self,
        pass: &mut Pass<B>,
        next: usize,
        forced: bool,
        budget: &mut dyn StepBudget,
    ) -> Result<(Stage, Step), ForwardError> {
        let Some(block) = pass.block(next) else {
            return Ok((self.behind_attention(pass.layer), Step::Taken(StepKind::Attention, 0)));
        };
        let past = pass.past(block.start) as u64;
        let units = |rows: usize| row_units(rows) * (ROW_POSITIONS + past + rows as u64 / 2);
        let most = budget.units(StepKind::Attention);
        let rows = rows_within(most, block.len(), forced, units);
        if rows == 0 {
            return Ok((Stage::Attention(next), Step::None));
        }
        let block = block.start..block.start + rows;
        let (ops, layer) = (&self.ops, &self.layers[pass.layer]);
        let at = pass.prepare(ops, &self.pages, &block)?;
        let indices: Vec<usize> = block.clone().collect();
        let angles = pass.angles.as_ref().map(|angles| ops.angles_of(angles, &indices)).transpose()?;
        let normed = ops.norm(&layer.before_attention, &ops.rows(&pass.x, &indices)?)?;
        let spans = &pass.prepared[at].1;
        let mut at = AttentionContext { ops, pages: &mut self.pages, angles: angles.as_ref(), spans };
        let output = layer.attention.forward(pass.layer, &normed, &mut at)?;
        let output = scaled(&self.ops, output, self.multipliers.residual)?;
        self.ops.add_rows(&mut pass.x, block.start, &output)?;
        let stage = match pass.block(block.end) {
            Some(_) => Stage::Attention(block.end),
            None => self.behind_attention(pass.layer),
        };
        Ok((stage, Step::Taken(StepKind::Attention, units(rows))))
    }

    fn behind_attention(&self, layer: usize) -> Stage {
        match &self.layers[layer].mlp {
            Mlp::Dense(_) => Stage::Dense(0),
            Mlp::Moe(_) => Stage::Route(0, Vec::new(), ExpertInputs::default()),
        }
    }

    /// The rows of a step from `next` on, normed for the feed-forward part; none where the budget has no room for them.
    fn normed_rows(
        &self,
        pass: &Pass<B>,
        next: usize,
        forced: bool,
        budget: &mut dyn StepBudget,
    ) -> Result<NormedRows<B>, ForwardError> {
        let most = budget.units(StepKind::Rows);
        let rows = rows_within(most, pass.rows() - next, forced, row_units);
        if rows == 0 {
            return Ok(None);
        }
        let indices: Vec<usize> = (next..next + rows).collect();
        let normed =
            self.ops.norm(&self.layers[pass.layer].before_mlp, &self.ops.rows(&pass.x, &indices)?)?;
        Ok(Some((next..next + rows, normed)))
    }

    fn dense_step(
        &self,
        pass: &mut Pass<B>,
        next: usize,
        forced: bool,
        budget: &mut dyn StepBudget,
    ) -> Result<(Stage, Step), ForwardError> {
        let Layer { mlp: Mlp::Dense(network), .. } = &self.layers[pass.layer] else {
            return Ok((
                Stage::Route(0, Vec::new(), ExpertInputs::default()),
                Step::Taken(StepKind::Rows, 0),
            ));
        };
        let Some((rows, normed)) = self.normed_rows(pass, next, forced, budget)? else {
            return Ok((Stage::Dense(next), Step::None));
        };
        let output = scaled(&self.ops, self.ops.gated(network, &normed)?, self.multipliers.residual)?;
        self.ops.add_rows(&mut pass.x, rows.start, &output)?;
        let stage = if rows.end < pass.rows() { Stage::Dense(rows.end) } else { pass.next_layer() };
        Ok((stage, Step::Taken(StepKind::Rows, row_units(rows.len()))))
    }

    fn route_step(
        &self,
        pass: &mut Pass<B>,
        next: usize,
        (mut hidden, mut inputs): (Vec<u8>, ExpertInputs),
        experts: &Experts,
        forced: bool,
        budget: &mut dyn StepBudget,
    ) -> Result<(Stage, Step), ForwardError> {
        let Layer { mlp: Mlp::Moe(moe), .. } = &self.layers[pass.layer] else {
            return Ok((Stage::Dense(0), Step::Taken(StepKind::Rows, 0)));
        };
        let Some((rows, normed)) = self.normed_rows(pass, next, forced, budget)? else {
            return Ok((Stage::Route(next, hidden, inputs), Step::None));
        };
        let (bytes, routed) = self.ops.route(&moe.router, &normed)?;
        hidden.extend_from_slice(&bytes);
        inputs.routed.append(routed);
        if let Some(shared) = moe.shared_on_device(&self.ops, &normed)? {
            // Attention has read these rows, and the sum over routed experts comes later.
            let shared = scaled(&self.ops, shared, self.multipliers.residual)?;
            self.ops.add_rows(&mut pass.x, rows.start, &shared)?;
        }
        moe.with_besides(&self.ops, &normed, rows.len(), |besides| {
            inputs.besides.extend_from_slice(besides.unwrap_or_default());
        })?;
        let stage = if rows.end < pass.rows() {
            Stage::Route(rows.end, hidden, inputs)
        } else {
            if let Some(trace) = &mut pass.trace {
                trace.routing.push(recorded(pass.layer, &inputs.routed));
            }
            inputs.inputs = hidden.into();
            let portions = experts.portions(&inputs.call(pass.layer), inputs.inputs.clone());
            Stage::Experts(inputs, portions)
        };
        Ok((stage, Step::Taken(StepKind::Rows, row_units(rows.len()))))
    }

    fn sum_step(
        &self,
        pass: &mut Pass<B>,
        next: usize,
        (inputs, portions): (ExpertInputs, Portions),
        experts: &Experts,
        forced: bool,
        budget: &mut dyn StepBudget,
    ) -> Result<(Stage, Step), ForwardError> {
        let most = budget.units(StepKind::Sum);
        let rows = rows_within(most, pass.rows() - next, forced, row_units);
        if rows == 0 {
            return Ok((Stage::Sum(next, inputs, portions), Step::None));
        }
        let (rows, row_bytes) = (next..next + rows, inputs.inputs.len() / pass.rows());
        let besides = inputs.besides.get(rows.start * row_bytes..rows.end * row_bytes);
        let (call, width) = (inputs.call(pass.layer), self.hidden);
        let output: B::Tensor = self.ops.filled(rows.len(), width, |output| {
            experts.join_portions(&call, &portions, rows.clone(), besides, output).map_err(ForwardError::from)
        })?;
        let output = scaled(&self.ops, output, self.multipliers.residual)?;
        self.ops.add_rows(&mut pass.x, rows.start, &output)?;
        let stage =
            if rows.end < pass.rows() { Stage::Sum(rows.end, inputs, portions) } else { pass.next_layer() };
        Ok((stage, Step::Taken(StepKind::Sum, row_units(rows.len()))))
    }
}

/// Rows and their normed hidden states; `None` where the budget has no room for any.
type NormedRows<B> = Option<(Range<usize>, <B as Backend>::Tensor)>;

/// The outcome of a step.
enum Step {
    /// The budget has no room for one.
    None,
    Taken(StepKind, u64),
}

impl<B: Backend> Pass<B> {
    fn next_layer(&mut self) -> Stage {
        self.layer += 1;
        Stage::Attention(0)
    }
}

fn expert_step(
    layer: usize,
    inputs: ExpertInputs,
    mut portions: Portions,
    experts: &mut Experts,
    forced: bool,
    budget: &mut dyn StepBudget,
) -> Result<(Stage, Step), ForwardError> {
    let call = inputs.call(layer);
    experts.follow_placement(&call, &mut portions);
    let remote = if portions.has_remote() { budget.units(StepKind::RemoteExperts) } else { 0 };
    let stops = if portions.has_remote() { remote == 0 } else { budget.is_over() };
    if stops && !forced {
        return Ok((Stage::Experts(inputs, portions), Step::None));
    }
    let RemoteUnits { units, hidden } =
        experts.compute_portion(&call, &mut portions, remote, &mut || budget.is_over())?;
    let stage = match portions.is_done() {
        true => Stage::Sum(0, inputs, portions),
        false => Stage::Experts(inputs, portions),
    };
    // Answers that local experts hid took half of the time, as far as is known: less may turn out if more is sent.
    let units = if hidden { 2 * units } else { units };
    Ok((stage, Step::Taken(StepKind::RemoteExperts, units)))
}
