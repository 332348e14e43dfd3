//! Options of one layer with a given remote set: memory sizes and numbers of replicas.
//!
//! An option with several replicas needs an assignment of experts to them, which is by far the most expensive step here. It
//! is computed on demand; until then the option has a lower bound.

use crate::search::remote_set::{RemoteSet, Stressed};
use crate::search::tables::LayerTable;
use ndarray::ArrayView1;
use remoe_plan::model::{LayerModel, Model, Seconds};
use remoe_plan::problem::sizes::{BYTE_SLACK, GB, first_at_least};

/// Prices of the terms of an option, in dollars.
#[derive(Debug, Clone, Copy)]
pub(crate) struct TermPrices {
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

/// Seconds of a layer in the main function at one main size.
#[derive(Debug, Clone, Copy)]
pub(crate) struct LocalTimes {
    /// Non-expert part.
    pub(crate) fixed: Seconds,
    /// Prefill seconds of the local experts.
    pub(crate) prefill: f64,
    /// Seconds of one local expert in a decode step.
    pub(crate) step: f64,
    /// Prefill seconds of the local experts if the prediction errs as far as it does in 5 % of the cases.
    pub(crate) stressed_prefill: f64,
}

/// Contribution of one option of a layer to times and cost.
#[derive(Debug, Clone, Copy, Default, PartialEq)]
pub(crate) struct CostTerms {
    /// Prefill seconds.
    pub(crate) prefill: f64,
    /// Seconds of one decode step.
    pub(crate) step: f64,
    /// Dollars of the remote function (invocation billing), or dollars per second (reserved).
    pub(crate) bill: f64,
    /// Prefill seconds that are compared with the limit.
    pub(crate) limit_prefill: f64,
    /// Seconds of one decode step that are compared with the limit.
    pub(crate) limit_step: f64,
}

impl CostTerms {
    /// Returns the terms of a layer without remote experts.
    pub(crate) fn all_local(layer: &LayerModel, local: LocalTimes) -> Self {
        let prefill = local.fixed.prefill + local.prefill;
        let step = local.fixed.step + layer.per_token() * local.step;
        Self { prefill, step, bill: 0.0, limit_prefill: prefill, limit_step: step }
    }

    /// Returns the dollars of all terms at `prices`.
    pub(crate) fn priced(&self, prices: TermPrices) -> f64 {
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

/// Figures of one option: a memory size with a number of replicas.
#[derive(Debug, Clone, Copy)]
struct OptionFigures {
    /// Prefill seconds of the slowest replica; infinite if a call exceeds the payload limit.
    seconds: f64,
    /// Prefill seconds if the prediction errs; 0 unless plans must be robust.
    stressed_seconds: f64,
    bill: f64,
    /// Set if the figures are exact, not lower bounds.
    exact: bool,
}

/// Key of an option: index of its memory size, and number of replicas.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct OptionChoice {
    pub(crate) memory: usize,
    pub(crate) replicas: usize,
}

impl OptionChoice {
    /// Returns the option with one more replica.
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
    /// Largest useful number of replicas.
    pub(crate) replicas: usize,
    /// `[size - first]`: prefill seconds of computing all experts and returning their rows.
    work: Vec<f64>,
    /// `[size - first]`: billed seconds of all decode steps.
    decode_billed: Vec<f64>,
    /// `[size - first][replicas - 1]`; filled on first use.
    cells: Vec<OptionFigures>,
    /// `[size - first]`: decode seconds for the local step `decode_for`.
    decode: Vec<f64>,
    decode_for: f64,
    /// Lower bounds over all options.
    least_seconds: f64,
    least_bill: f64,
}

impl<'m> LayerOptions<'m> {
    /// Prepares the options of `layer` with its `count` least used experts remote, at least one.
    ///
    /// `factor`: error factor of the set's share that plans must tolerate. Returns `None` if no remote size holds the set.
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

    /// Returns the share of the layer's assignments that go to the set.
    pub(crate) fn share(&self) -> f64 {
        self.expected.share
    }

    /// Returns the seconds of one remote expert for one token on each remote size, including the returned row.
    pub(crate) fn steps(&self) -> impl Iterator<Item = f64> {
        self.table.remote_step.iter().copied()
    }

    fn sizes(&self) -> std::ops::Range<usize> {
        self.first..self.model.remote_sizes.len()
    }

    fn memory_gb(&self, memory: usize) -> f64 {
        self.model.remote_sizes[memory] / GB
    }

    /// Returns the least seconds of sending the set's tokens.
    fn sending_seconds(&self) -> f64 {
        self.expected.token_sum.min(self.model.input) * self.model.up
    }

    /// Computes the figures that do not depend on replicas or the main size.
    fn measure(&mut self) {
        let (model, per_token) = (self.model, self.model.layers[self.layer].per_token());
        let case = &self.expected;
        let called = 1.0 - (1.0 - case.share).powi(per_token as i32);
        let answers = case.token_sum * model.down;
        let (mut work, mut billed) = (Vec::new(), Vec::new());
        let mut least_bill = f64::INFINITY;
        for memory in self.sizes() {
            let seconds = self.table.remote_prefill(self.count, memory) + answers;
            let step = per_token * case.share * self.table.remote_step[memory] + called * model.round_trip();
            work.push(seconds);
            billed.push(model.output * step);
            least_bill =
                least_bill.min(self.bill(memory, 1, self.one_replica(seconds) + model.output * step));
        }
        let fastest = work.last().copied().unwrap_or(0.0);
        self.least_seconds = match self.one_replica(fastest) {
            seconds if self.replicas == 1 || seconds == 0.0 => seconds,
            _ => (fastest + self.sending_seconds()) / self.replicas as f64 + model.invoke,
        };
        (self.work, self.decode_billed, self.least_bill) = (work, billed, least_bill);
    }

    /// Returns the seconds of a single replica that computes and returns rows in `work` seconds.
    fn one_replica(&self, work: f64) -> f64 {
        if self.expected.token_sum > 0.0 { work + self.sending_seconds() + self.model.invoke } else { 0.0 }
    }

    fn bill(&self, memory: usize, replicas: usize, seconds: f64) -> f64 {
        let rate = self.model.cpu_price * self.memory_gb(memory);
        if self.model.is_reserved() {
            rate * replicas as f64 / f64::from(self.model.problem.pricing.main_replicas)
        } else {
            rate * seconds
        }
    }

    /// Fills the lower bounds of all cells, and the decode seconds for `local`.
    fn fill(&mut self, local: LocalTimes) {
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
        // If experts take no time, all of them may be assigned to one replica.
        let takes_time =
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
                let search_counts = one - model.invoke;
                let active = if takes_time { replicas.min(working) } else { 1 };
                let seconds = match (one > 0.0, replicas) {
                    (false, _) => 0.0,
                    (true, _) if !fits(travelling / replicas as f64) => f64::INFINITY,
                    (true, 1) => one,
                    (true, _) => (search_counts / replicas as f64).max(alone) + model.invoke,
                };
                let in_all = if one > 0.0 { search_counts + active as f64 * model.invoke } else { 0.0 };
                cells.push(OptionFigures {
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

    /// Replaces the lower bounds of a cell by exact figures.
    fn make_exact(&mut self, cell: usize) {
        if self.cells[cell].exact {
            return;
        }
        let choice = self.choice(cell);
        let expected = self.expected.split(choice);
        let stressed_seconds =
            self.stressed.as_ref().map_or(0.0, |stressed| stressed.set.split(choice).slowest);
        let billed = self.decode_billed[choice.memory - self.first];
        self.cells[cell] = OptionFigures {
            seconds: expected.slowest,
            stressed_seconds,
            bill: self.bill(choice.memory, choice.replicas, expected.in_all + billed),
            exact: true,
        };
    }

    /// Returns the local times of this layer with the main size at `main`.
    pub(crate) fn local(&self, main: usize) -> LocalTimes {
        let column = self.table.main[main];
        let prefill = column.of(self.table.local_prefill_columns(self.count));
        let stressed_prefill =
            self.stressed.as_ref().map_or(prefill, |stressed| column.of(ArrayView1::from(&stressed.local)));
        // Calls depend on the set's share, not on its size or replicas.
        let called = 1.0 - (1.0 - self.expected.share).powi(self.model.layers[self.layer].top_k as i32);
        let calls = if self.expected.token_sum > 0.0 { 1.0 } else { 0.0 };
        let send = Seconds { prefill: calls * self.model.send, step: called * self.model.send };
        LocalTimes {
            fixed: self.table.fixed[main].plus(send),
            prefill,
            step: self.table.main_step[main],
            stressed_prefill,
        }
    }

    /// Returns the least prefill and decode seconds over all options, each independently.
    pub(crate) fn fastest(&self, local: LocalTimes) -> (f64, f64) {
        let remote = self.table.remote_step.last().copied().unwrap_or(0.0);
        (
            local.fixed.prefill + local.prefill.max(self.least_seconds),
            local.fixed.step + self.expected.path.seconds(local.step, remote),
        )
    }

    /// Returns the least bill of any option.
    pub(crate) fn least_bill(&self) -> f64 {
        self.least_bill
    }

    /// Returns a lower bound of the priced terms of all options, without exact figures.
    pub(crate) fn lower_bound(&mut self, prices: TermPrices, local: LocalTimes) -> f64 {
        self.fill(local);
        self.cheapest_cell(prices, local).1
    }

    /// Returns the cheapest option at `prices`, with its terms and its priced value.
    ///
    /// Ties go to fewer replicas, then to less memory. Returns `None` if the payload limit forbids all options.
    pub(crate) fn cheapest(
        &mut self,
        prices: TermPrices,
        local: LocalTimes,
    ) -> Option<(OptionChoice, CostTerms, f64)> {
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
            self.make_exact(cell);
        }
    }

    fn cheapest_cell(&self, prices: TermPrices, local: LocalTimes) -> (usize, f64) {
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
                // The local path is the slower one: more replicas save nothing.
                if cell.seconds <= local.prefill {
                    break;
                }
            }
        }
        (best.0, best.1 + prefill * local.fixed.prefill + step * local.fixed.step)
    }

    fn cheapest_stressed_cell(&self, prices: TermPrices, local: LocalTimes) -> (usize, f64) {
        let mut best = (0, f64::INFINITY);
        for cell in 0..self.cells.len() {
            let value = self.terms_of(cell, local).priced(prices);
            if value < best.1 * (1.0 - 1e-14) {
                best = (cell, value);
            }
        }
        best
    }

    fn terms_of(&self, cell: usize, local: LocalTimes) -> CostTerms {
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
        CostTerms { prefill, step, bill: figures.bill, limit_prefill, limit_step }
    }

    /// Returns the terms of one option, or `None` if the payload limit forbids it.
    pub(crate) fn terms(&mut self, choice: OptionChoice, local: LocalTimes) -> Option<CostTerms> {
        if !self.sizes().contains(&choice.memory) || !(1..=self.replicas).contains(&choice.replicas) {
            return None;
        }
        self.fill(local);
        let cell = self.cell_index(choice);
        self.make_exact(cell);
        Some(self.terms_of(cell, local)).filter(|terms| terms.limit_prefill.is_finite())
    }

    /// Returns every option whose priced terms are at most `most`, with its terms.
    pub(crate) fn up_to(
        &mut self,
        prices: impl Fn(&CostTerms) -> f64,
        local: LocalTimes,
        most: f64,
    ) -> Vec<(OptionChoice, CostTerms)> {
        self.fill(local);
        let mut found = Vec::new();
        for cell in 0..self.cells.len() {
            if prices(&self.terms_of(cell, local)) > most {
                continue;
            }
            self.make_exact(cell);
            let terms = self.terms_of(cell, local);
            if terms.limit_prefill.is_finite() && prices(&terms) <= most {
                found.push((self.choice(cell), terms));
            }
        }
        found
    }
}
