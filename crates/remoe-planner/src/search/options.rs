//! The options of one layer with a given remote set: memory sizes and replica counts.
//!
//! An option with several replicas needs an assignment of experts to them, which is by far the most expensive figure
//! here. Until the figure is needed, the option is known by a lower bound.

use crate::search::remote_set::{RemoteSet, Stressed};
use crate::search::tables::LayerTable;
use ndarray::ArrayView1;
use remoe_plan::model::{LayerModel, Model, Seconds};
use remoe_plan::problem::sizes::{BYTE_SLACK, GB, first_at_least};

/// Dollars for what an option uses.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Prices {
    /// Price of one second of prefill.
    pub(crate) prefill: f64,
    /// Price of one second of a decode step.
    pub(crate) step: f64,
    /// Price of one unit of the option's bill.
    pub(crate) bill: f64,
    /// Price of one second of prefill that counts against the limit: the limit's multiplier.
    pub(crate) limit_prefill: f64,
    /// Price of one second of a decode step that counts against the limit: the limit's multiplier.
    pub(crate) limit_step: f64,
}

/// Times of a layer in the main function at one main size.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Local {
    /// Everything but routed experts.
    pub(crate) fixed: Seconds,
    /// Prefill seconds of the local experts.
    pub(crate) prefill: f64,
    /// Seconds of one local expert in a decode step.
    pub(crate) step: f64,
    /// The prefill seconds when the prediction errs as far as it does in 5 % of the cases.
    pub(crate) stressed_prefill: f64,
}

/// Contribution of one option of a layer to times and cost.
#[derive(Debug, Clone, Copy, Default, PartialEq)]
pub(crate) struct Terms {
    /// Prefill seconds.
    pub(crate) prefill: f64,
    /// Seconds of one decode step.
    pub(crate) step: f64,
    /// Dollars of the remote function (invocation billing), or dollars per second (reserved).
    pub(crate) bill: f64,
    /// The prefill seconds that count against the limit.
    pub(crate) limit_prefill: f64,
    /// The decode seconds that count against the limit.
    pub(crate) limit_step: f64,
}

impl Terms {
    /// Terms of a layer without remote experts.
    pub(crate) fn all_local(layer: &LayerModel, local: Local) -> Self {
        let prefill = local.fixed.prefill + local.prefill;
        let step = local.fixed.step + layer.per_token() * local.step;
        Self { prefill, step, bill: 0.0, limit_prefill: prefill, limit_step: step }
    }

    pub(crate) fn priced(&self, prices: Prices) -> f64 {
        prices.prefill * self.prefill
            + prices.step * self.step
            + prices.bill * self.bill
            + prices.limit_prefill * self.limit_prefill
            + prices.limit_step * self.limit_step
    }

    pub(crate) fn plus(&self, other: &Self) -> Self {
        Self {
            prefill: self.prefill + other.prefill,
            step: self.step + other.step,
            bill: self.bill + other.bill,
            limit_prefill: self.limit_prefill + other.limit_prefill,
            limit_step: self.limit_step + other.limit_step,
        }
    }

    pub(crate) fn minus(&self, other: &Self) -> Self {
        Self {
            prefill: self.prefill - other.prefill,
            step: self.step - other.step,
            bill: self.bill - other.bill,
            limit_prefill: self.limit_prefill - other.limit_prefill,
            limit_step: self.limit_step - other.limit_step,
        }
    }
}

/// One option: a memory size with a number of replicas.
#[derive(Debug, Clone, Copy)]
struct Cell {
    /// Prefill seconds of the slowest replica; infinite where the payload limit forbids it.
    seconds: f64,
    /// Seconds in the stressed case; 0 where that was not asked.
    stressed_seconds: f64,
    bill: f64,
    /// Set if these are figures, not lower bounds.
    exact: bool,
}

/// Name of an option: index of its memory size and number of replicas.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct OptionChoice {
    pub(crate) memory: usize,
    pub(crate) replicas: usize,
}

impl OptionChoice {
    /// With one replica more.
    pub(crate) fn raised(self) -> Self {
        Self { replicas: self.replicas + 1, ..self }
    }
}

/// All options of one layer.
#[derive(Debug)]
pub(crate) struct LayerOptions<'m> {
    model: &'m Model<'m>,
    table: &'m LayerTable,
    layer: usize,
    count: usize,
    expected: RemoteSet<'m>,
    stressed: Option<Stressed<'m>>,
    /// Index of the smallest size that holds the set.
    pub(crate) first: usize,
    /// The most replicas that can help.
    pub(crate) replicas: usize,
    /// Seconds of computation and answers on each size from `first`, all experts together.
    work: Vec<f64>,
    /// Remote seconds of all decode steps on each of them.
    decode_billed: Vec<f64>,
    /// `[size][replicas - 1]`; filled when it is first asked for.
    cells: Vec<Cell>,
    /// Decode seconds on each size from `first`, for the local step that they were asked for.
    decode: Vec<f64>,
    decode_for: f64,
    /// Figures that no option undercuts.
    least_seconds: f64,
    least_bill: f64,
}

impl<'m> LayerOptions<'m> {
    /// The options of `layer` when its `count` least used experts are remote, at least one; none
    /// where no remote size holds them. `factor`: how far the set's share may exceed its prediction.
    pub(crate) fn new(
        model: &'m Model<'m>,
        table: &'m LayerTable,
        layer: usize,
        count: usize,
        factor: Option<f64>,
    ) -> Option<Self> {
        let expected = RemoteSet::expected(model, table, layer, count);
        let stressed = factor.map(|factor| Stressed::new(model, table, layer, count, factor));
        let needed = |share| model.remote_needed(layer, count, share);
        let mut bytes = needed(expected.share);
        if let Some(stressed) = &stressed {
            bytes = bytes.max(needed(stressed.set.share));
        }
        let first = first_at_least(&model.remote_sizes, bytes);
        if first == model.remote_sizes.len() {
            return None;
        }
        let mut options = Self {
            model,
            table,
            layer,
            count,
            expected,
            stressed,
            first,
            replicas: model.useful_replicas(count),
            work: Vec::new(),
            decode_billed: Vec::new(),
            cells: Vec::new(),
            decode: Vec::new(),
            decode_for: f64::NAN,
            least_seconds: 0.0,
            least_bill: 0.0,
        };
        options.measure();
        Some(options)
    }

    /// Share of the layer's assignments that go to the set.
    pub(crate) fn share(&self) -> f64 {
        self.expected.share
    }

    /// Seconds of one remote expert for one token on each remote size, with the way back.
    pub(crate) fn steps(&self) -> impl Iterator<Item = f64> {
        self.table.remote_step.iter().copied()
    }

    fn sizes(&self) -> std::ops::Range<usize> {
        self.first..self.model.remote_sizes.len()
    }

    fn memory_gb(&self, memory: usize) -> f64 {
        self.model.remote_sizes[memory] / GB
    }

    /// Seconds that the set's tokens travel, at least.
    fn travel(&self) -> f64 {
        self.expected.token_sum.min(self.model.input) * self.model.up
    }

    fn measure(&mut self) {
        let (model, per_token) = (self.model, self.model.layers[self.layer].per_token());
        let case = &self.expected;
        let called = 1.0 - (1.0 - case.share).powi(per_token as i32);
        let answers = case.token_sum * model.down;
        let (mut work, mut billed) = (Vec::new(), Vec::new());
        let mut least_bill = f64::INFINITY;
        for memory in self.sizes() {
            let seconds = self.table.away(self.count, memory) + answers;
            let step = per_token * case.share * self.table.remote_step[memory] + called * model.round_trip();
            work.push(seconds);
            billed.push(model.output * step);
            least_bill =
                least_bill.min(self.bill(memory, 1, self.one_replica(seconds) + model.output * step));
        }
        let fastest = work.last().copied().unwrap_or(0.0);
        self.least_seconds = match self.one_replica(fastest) {
            seconds if self.replicas == 1 || seconds == 0.0 => seconds,
            _ => (fastest + self.travel()) / self.replicas as f64 + model.invoke,
        };
        (self.work, self.decode_billed, self.least_bill) = (work, billed, least_bill);
    }

    /// Seconds of a single replica that computes and answers in `work` seconds.
    fn one_replica(&self, work: f64) -> f64 {
        if self.expected.token_sum > 0.0 { work + self.travel() + self.model.invoke } else { 0.0 }
    }

    fn bill(&self, memory: usize, replicas: usize, seconds: f64) -> f64 {
        let rate = self.model.cpu_price * self.memory_gb(memory);
        if self.model.is_reserved() {
            rate * replicas as f64 / f64::from(self.model.problem.pricing.main_replicas)
        } else {
            rate * seconds
        }
    }

    /// Readies cells and decode seconds for questions at `local`.
    fn fill(&mut self, local: Local) {
        if self.decode_for != local.step {
            let path = &self.expected.path;
            let steps = self.table.remote_step[self.first..].iter();
            self.decode.clear();
            self.decode.extend(steps.map(|remote| path.seconds(local.step, *remote)));
            self.decode_for = local.step;
        }
        if !self.cells.is_empty() {
            return;
        }
        let model = self.model;
        let case = &self.expected;
        let heaviest = case.tokens.last().copied().zip(case.rows.last().copied());
        let working = case.tokens.iter().filter(|tokens| **tokens > 0.0).count();
        // Weightless experts may all land on one replica.
        let weighs =
            model.up + model.down > 0.0 || self.table.remote_step.last().is_some_and(|step| *step > 0.0);
        let allowed = model.problem.limits.payload_bytes.unwrap_or(f64::INFINITY) + BYTE_SLACK;
        let travelling = case.token_sum.min(model.input);
        let fits = |tokens: f64| tokens * model.problem.transport.token_bytes_up <= allowed;
        let mut cells = Vec::with_capacity(self.work.len() * self.replicas);
        for (index, memory) in self.sizes().enumerate() {
            let (work, billed) = (self.work[index], self.decode_billed[index]);
            let column = self.table.remote[memory];
            let curve = model.layers[self.layer].remote_curve();
            let alone = heaviest.map_or(0.0, |(tokens, row)| {
                curve.at(row, column) + tokens * model.down + tokens.min(model.input) * model.up
            });
            for replicas in 1..=self.replicas {
                let one = self.one_replica(work);
                let spread = one - model.invoke;
                let active = if weighs { replicas.min(working) } else { 1 };
                let seconds = match (one > 0.0, replicas) {
                    (false, _) => 0.0,
                    (true, _) if !fits(travelling / replicas as f64) => f64::INFINITY,
                    (true, 1) => one,
                    (true, _) => (spread / replicas as f64).max(alone) + model.invoke,
                };
                let in_all = if one > 0.0 { spread + active as f64 * model.invoke } else { 0.0 };
                cells.push(Cell {
                    seconds,
                    stressed_seconds: 0.0,
                    bill: self.bill(memory, replicas, in_all + billed),
                    exact: replicas == 1 && self.stressed.is_none(),
                });
            }
        }
        self.cells = cells;
    }

    fn cell_index(&self, choice: OptionChoice) -> usize {
        (choice.memory - self.first) * self.replicas + choice.replicas - 1
    }

    fn choice(&self, cell: usize) -> OptionChoice {
        OptionChoice { memory: self.first + cell / self.replicas, replicas: cell % self.replicas + 1 }
    }

    /// Replaces the bounds of a cell by figures.
    fn settle(&mut self, cell: usize) {
        if self.cells[cell].exact {
            return;
        }
        let choice = self.choice(cell);
        let expected = self.expected.split(choice);
        let stressed_seconds =
            self.stressed.as_ref().map_or(0.0, |stressed| stressed.set.split(choice).slowest);
        let billed = self.decode_billed[choice.memory - self.first];
        self.cells[cell] = Cell {
            seconds: expected.slowest,
            stressed_seconds,
            bill: self.bill(choice.memory, choice.replicas, expected.in_all + billed),
            exact: true,
        };
    }

    /// Returns the local times of this layer with the main size at `main`.
    pub(crate) fn local(&self, main: usize) -> Local {
        let column = self.table.main[main];
        let prefill = column.of(self.table.stay(self.count));
        let stressed_prefill =
            self.stressed.as_ref().map_or(prefill, |stressed| column.of(ArrayView1::from(&stressed.local)));
        // The set's share, not its size or replicas, says how often it is called.
        let called = 1.0 - (1.0 - self.expected.share).powi(self.model.layers[self.layer].top_k as i32);
        let calls = if self.expected.token_sum > 0.0 { 1.0 } else { 0.0 };
        let send = Seconds { prefill: calls * self.model.send, step: called * self.model.send };
        Local {
            fixed: self.table.fixed[main].plus(send),
            prefill,
            step: self.table.main_step[main],
            stressed_prefill,
        }
    }

    /// The least times that any option can have, each by itself.
    pub(crate) fn fastest(&self, local: Local) -> (f64, f64) {
        let remote = self.table.remote_step.last().copied().unwrap_or(0.0);
        (
            local.fixed.prefill + local.prefill.max(self.least_seconds),
            local.fixed.step + self.expected.path.seconds(local.step, remote),
        )
    }

    /// The least bill of any option.
    pub(crate) fn least_bill(&self) -> f64 {
        self.least_bill
    }

    /// At most what the cheapest option costs, from the bounds alone.
    pub(crate) fn lower_bound(&mut self, prices: Prices, local: Local) -> f64 {
        self.fill(local);
        self.cheapest_cell(prices, local).1
    }

    /// The cheapest option at these prices and its terms; of equal ones the one with fewer replicas,
    /// then with less memory. None where the payload limit forbids all.
    pub(crate) fn cheapest(&mut self, prices: Prices, local: Local) -> Option<(OptionChoice, Terms, f64)> {
        self.fill(local);
        loop {
            let (cell, value) = self.cheapest_cell(prices, local);
            if value == f64::INFINITY {
                return None;
            }
            if self.cells[cell].exact {
                let choice = self.choice(cell);
                return Some((choice, self.terms_of(cell, local), value));
            }
            self.settle(cell);
        }
    }

    fn cheapest_cell(&self, prices: Prices, local: Local) -> (usize, f64) {
        if self.stressed.is_some() {
            return self.cheapest_stressed_cell(prices, local);
        }
        let (prefill, step) = (prices.prefill + prices.limit_prefill, prices.step + prices.limit_step);
        let mut best = (0, f64::INFINITY);
        for (index, (cells, decode)) in self.cells.chunks_exact(self.replicas).zip(&self.decode).enumerate() {
            let decode = step * decode;
            for (extra, cell) in cells.iter().enumerate() {
                let value = prefill * local.prefill.max(cell.seconds) + prices.bill * cell.bill + decode;
                if value < best.1 * (1.0 - 1e-14) {
                    best = (index * self.replicas + extra, value);
                }
                // More replicas cost more and would save nothing.
                if cell.seconds <= local.prefill {
                    break;
                }
            }
        }
        (best.0, best.1 + prefill * local.fixed.prefill + step * local.fixed.step)
    }

    fn cheapest_stressed_cell(&self, prices: Prices, local: Local) -> (usize, f64) {
        let mut best = (0, f64::INFINITY);
        for cell in 0..self.cells.len() {
            let value = self.terms_of(cell, local).priced(prices);
            if value < best.1 * (1.0 - 1e-14) {
                best = (cell, value);
            }
        }
        best
    }

    fn terms_of(&self, cell: usize, local: Local) -> Terms {
        let figures = self.cells[cell];
        let size = cell / self.replicas;
        let prefill = local.fixed.prefill + local.prefill.max(figures.seconds);
        let step = local.fixed.step + self.decode[size];
        let (mut limit_prefill, mut limit_step) = (prefill, step);
        if let Some(stressed) = &self.stressed {
            let slower = local.stressed_prefill.max(figures.stressed_seconds);
            limit_prefill = limit_prefill.max(local.fixed.prefill + slower);
            let remote = self.table.remote_step[self.first + size];
            let decode = stressed.set.path.seconds(local.step, remote);
            limit_step = limit_step.max(local.fixed.step + decode);
        }
        Terms { prefill, step, bill: figures.bill, limit_prefill, limit_step }
    }

    /// The terms of one option, where the payload limit allows it.
    pub(crate) fn terms(&mut self, choice: OptionChoice, local: Local) -> Option<Terms> {
        if !self.sizes().contains(&choice.memory) || !(1..=self.replicas).contains(&choice.replicas) {
            return None;
        }
        self.fill(local);
        let cell = self.cell_index(choice);
        self.settle(cell);
        Some(self.terms_of(cell, local)).filter(|terms| terms.limit_prefill.is_finite())
    }

    /// Every option whose priced terms may be at most `most`, with its exact terms.
    pub(crate) fn up_to(
        &mut self,
        prices: impl Fn(&Terms) -> f64,
        local: Local,
        most: f64,
    ) -> Vec<(OptionChoice, Terms)> {
        self.fill(local);
        let mut found = Vec::new();
        for cell in 0..self.cells.len() {
            if prices(&self.terms_of(cell, local)) > most {
                continue;
            }
            self.settle(cell);
            let terms = self.terms_of(cell, local);
            if terms.limit_prefill.is_finite() && prices(&terms) <= most {
                found.push((self.choice(cell), terms));
            }
        }
        found
    }
}
