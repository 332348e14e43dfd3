//! Cost accounting by request and tenant: records for the ledger, metrics, and today's spending of tenants and
//! models.

use crate::cost_metrics::CostMetrics;
use crate::spending::{DAY, DaySpending, OtherGatewaySpending, Payer};
use prometheus::Registry;
use remoe_billing::{
    FunctionEvent, FunctionLives, FunctionRecord, Ledger, LedgerTotals, LedgerTotalsError, LifeChange,
    Phases, Rates, Record, ReportedCost, RequestCost, RequestRecord, TierCharge, records, records_since,
};
use std::collections::BTreeMap;
use std::sync::{Mutex, MutexGuard, PoisonError};
use std::time::{Duration, SystemTime, UNIX_EPOCH};

/// A main function and its remote functions: their prices, and their names in the ledger.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct Billing {
    /// Prices of the functions, by their names in reports of the main function.
    pub rates: Rates,
    /// Unique name and tier of each function, by the names of `rates`.
    pub functions: BTreeMap<String, (String, String)>,
    /// Number of restarts of the main function's process under the same name.
    pub restarts: u32,
}

impl Billing {
    /// Returns the unique name of the main function.
    fn main_function(&self) -> &str {
        self.functions.get("main").map(|(function, _)| function.as_str()).unwrap_or_default()
    }

    /// Returns the name of the main function's process: each restart counts its work from zero.
    pub(crate) fn main_process(&self) -> String {
        let main = self.main_function();
        if self.restarts == 0 { main.to_owned() } else { format!("{main}#{}", self.restarts) }
    }
}

/// Answer whose last bytes are about to be sent.
pub struct CompletedRequest<'a> {
    /// Value of `x-request-id`.
    pub id: &'a str,
    /// The model's name.
    pub model: &'a str,
    /// Tenant of the request; empty if the gateway has no keys.
    pub tenant: &'a str,
    /// Tokens of the prompts.
    pub prompt_tokens: u64,
    /// Tokens of the answer.
    pub completion_tokens: u64,
    /// Cost that the main function reports.
    pub reported: ReportedCost,
}

/// Cost accounting. The gateway records answers, and the launcher of functions records when these start and stop.
pub struct CostAccounting {
    ledger: Option<Ledger>,
    /// Set if a ledger was configured and cannot be used. Each record then counts as a failed write.
    is_ledger_missing: bool,
    metrics: CostMetrics,
    state: Mutex<LedgerState>,
}

struct LedgerState {
    /// Totals of all records since this was opened.
    totals: LedgerTotals,
    /// Today's spending at this gateway.
    spent_here: DaySpending,
    /// Today's spending at other gateways that share the budgets.
    spent_elsewhere: OtherGatewaySpending,
}

impl CostAccounting {
    /// Opens accounting with `ledger`, or in the memory of this process alone. `prices` names the source of the
    /// prices.
    ///
    /// # Errors
    /// The ledger cannot be read, or `registry` has a metric of the same name.
    pub fn open(
        ledger: Option<Ledger>,
        prices: &str,
        registry: &Registry,
    ) -> Result<Self, CostAccountingError> {
        let now = now();
        let day = now / DAY;
        let mut spent = DaySpending::on_day_of(now);
        if let Some(ledger) = &ledger {
            for record in records_since(ledger.folder(), day * DAY).map_err(LedgerTotalsError::from)? {
                match record.map_err(LedgerTotalsError::from)? {
                    Record::Request(request) if request.at / DAY == day => {
                        spent.add(request.at, &request.model, &request.tenant, request.total());
                    }
                    Record::Lost { at, model, tenant, estimate, .. } if at / DAY == day => {
                        spent.add(at, &model, &tenant, estimate);
                    }
                    _ => {}
                }
            }
        }
        let state = LedgerState {
            totals: LedgerTotals::default(),
            spent_here: spent,
            spent_elsewhere: OtherGatewaySpending::default(),
        };
        let metrics = CostMetrics::new(registry, prices)?;
        let cost_accounting = Self { ledger, is_ledger_missing: false, metrics, state: Mutex::new(state) };
        cost_accounting.write(&Record::Opened { at: now, prices: prices.to_owned() });
        Ok(cost_accounting)
    }

    /// Counts each record as a failed write, because a ledger was configured and cannot be used.
    #[must_use]
    pub fn with_unusable_ledger(mut self) -> Self {
        self.is_ledger_missing = true;
        self
    }

    /// Records an `event` in the life of a function. `at` is in nanoseconds since 1970, as from [`Self::now`].
    pub fn record_function_event(&self, at: u64, model: &str, function: &str, event: FunctionEvent) {
        let (model, function) = (model.to_owned(), function.to_owned());
        self.write(&Record::Function(FunctionRecord { at, model, function, event }));
    }

    /// Records `changes` in the lives of the functions of `model`, and sets the metrics of what each of its tiers
    /// costs now.
    pub fn record_life_changes(&self, model: &str, changes: Vec<LifeChange>, lives: &FunctionLives) {
        for LifeChange { at, function, event } in changes {
            self.record_function_event(at, model, &function, event);
        }
        for TierCharge { tier, rate, memory_bytes } in lives.charges() {
            self.set_current_cost(model, &tier, rate.0, memory_bytes);
        }
    }

    /// Returns the time in nanoseconds since 1970.
    #[must_use]
    pub fn now() -> u64 {
        now()
    }

    /// Records that all functions that have started and not stopped are alive. `overhead` is the cost of gateway and
    /// launcher since the last call, in nano-dollars.
    pub fn record_alive(&self, overhead: u64) {
        self.write(&Record::Alive { at: now(), overhead });
    }

    /// Sets the metrics of a `tier` of `model`: its living functions cost `rate` nano-dollars per hour and have
    /// `memory` bytes.
    pub fn set_current_cost(&self, model: &str, tier: &str, rate: u64, memory: u64) {
        self.metrics.set_rate(model, tier, rate);
        self.metrics.set_memory(model, tier, memory);
    }

    /// Returns the totals of all records in the ledger, or of this process if there is no ledger.
    ///
    /// # Errors
    /// The ledger cannot be read.
    pub fn totals(&self) -> Result<LedgerTotals, LedgerTotalsError> {
        match &self.ledger {
            Some(ledger) => LedgerTotals::from_records(records(ledger.folder())?),
            None => Ok(self.totals_since_start()),
        }
    }

    /// Returns the totals of all records since this was opened, with function time until now.
    pub(crate) fn totals_since_start(&self) -> LedgerTotals {
        self.state().totals.clone().until(now())
    }

    /// Records the cost of an answered request, which was sent to the functions of `billing`. Functions that joined
    /// later are priced by `current`, if it has them. Returns the recorded cost, which is what the client is told.
    /// Returns `None` if the ledger write failed.
    pub fn record_answer(
        &self,
        request: CompletedRequest<'_>,
        billing: &Billing,
        current: Option<&Billing>,
    ) -> Option<RequestCost> {
        let CompletedRequest { id, model, tenant, prompt_tokens, completion_tokens, reported } = request;
        let shares = reported.shares.into_iter().filter_map(|(name, mut share)| {
            let (function, tier) = match (billing.functions.get(&name), current) {
                (Some(known), _) => known,
                (None, Some(current)) => {
                    let rate = current.rates.0.get(&name).copied().unwrap_or_default();
                    let Phases { prefill, decode } = share.work;
                    share.cost = Phases { prefill: rate.cost(prefill), decode: rate.cost(decode) };
                    current.functions.get(&name)?
                }
                (None, None) => return None,
            };
            share.tier.clone_from(tier);
            Some((function.clone(), share))
        });
        let request = RequestRecord {
            at: now(),
            id: id.to_owned(),
            model: model.to_owned(),
            tenant: tenant.to_owned(),
            function: billing.main_process(),
            prompt_tokens,
            completion_tokens,
            shares: shares.collect(),
            rivals: reported.rivals,
            served: reported.served,
        };
        let cost = request.cost(billing.main_function());
        self.metrics.add_request(&request);
        self.state().spent_here.add(request.at, model, tenant, cost.total);
        self.write(&Record::Request(request)).then_some(cost)
    }

    /// Records that the request `id` ends without an answer, after an estimated number of `tokens`. A function got it
    /// at `sent_at` and had it for `elapsed` nanoseconds. The tenant's budget is charged the average cost of as many
    /// tokens of the model's answers, so that a client cannot avoid payment by leaving early.
    pub(crate) fn record_lost(
        &self,
        id: &str,
        model: &str,
        tenant: &str,
        (sent_at, elapsed): (u64, u64),
        tokens: u64,
        billing: &Billing,
    ) {
        let at = now();
        let answered = self.state().totals.by_model.get(model).copied().unwrap_or_default();
        let answered_tokens = u128::from(answered.prompt_tokens) + u128::from(answered.completion_tokens);
        let estimate = match (u128::from(answered.cost) * u128::from(tokens)).checked_div(answered_tokens) {
            Some(estimate) => u64::try_from(estimate).unwrap_or(u64::MAX),
            None if tokens == 0 => 0,
            // No average yet: take the price of all its functions for the elapsed time, an upper bound.
            None => billing.rates.0.values().fold(0_u64, |sum, rate| sum.saturating_add(rate.cost(elapsed))),
        };
        self.state().spent_here.add(at, model, tenant, estimate);
        let (id, model, tenant) = (id.to_owned(), model.to_owned(), tenant.to_owned());
        self.write(&Record::Lost {
            at,
            since: sent_at,
            estimate,
            model,
            tenant,
            function: billing.main_process(),
            id,
        });
    }

    /// Returns the nano-dollars that the requests of `model` since the start would have cost more with all experts in
    /// the main function. Negative if they would have cost less.
    #[must_use]
    pub fn savings(&self, model: &str) -> i64 {
        self.metrics.savings(model, "mix")
    }

    /// Returns today's spending of `payers` at this gateway.
    pub(crate) fn spending<'a>(&self, payers: impl Iterator<Item = Payer<'a>>) -> DaySpending {
        let mut state = self.state();
        state.spent_here.begin_day(now());
        state.spent_here.only(payers)
    }

    /// Takes today's spending at another `gateway` that shares the budgets.
    pub(crate) fn spent_elsewhere(&self, gateway: &str, spending: DaySpending) {
        self.state().spent_elsewhere.report(gateway, now(), spending);
    }

    /// Returns the nano-dollars that `payer` has spent today at all gateways, and the time until the day ends (UTC).
    pub(crate) fn spent_today(&self, payer: Payer<'_>) -> (u64, Duration) {
        let now = now();
        let mut state = self.state();
        state.spent_here.begin_day(now);
        (state.spent_by(payer, now), Duration::from_nanos(DAY - now % DAY))
    }

    /// Updates the metrics that depend on the time. `budgets` are payers with their daily budgets in nano-dollars.
    pub(crate) fn refresh_metrics<'a>(&self, budgets: impl Iterator<Item = (Payer<'a>, u64)>) {
        let now = now();
        let mut state = self.state();
        state.spent_here.begin_day(now);
        for (payer, budget) in budgets {
            self.metrics.set_budget(payer, budget, state.spent_by(payer, now));
        }
        drop(state);
        self.metrics.set_totals(&self.totals_since_start());
    }

    pub(crate) fn metrics(&self) -> &CostMetrics {
        &self.metrics
    }

    /// Records `record`. Returns false if a configured ledger did not take it. Serving continues then; a metric, on
    /// which an alert is based, counts the failure.
    fn write(&self, record: &Record) -> bool {
        let mut state = self.state();
        let mut is_recorded = !self.is_ledger_missing;
        if let Some(ledger) = &self.ledger {
            let written = ledger.append(record);
            is_recorded = written.is_ok();
            match written {
                Ok(()) => self.metrics.count_write(),
                Err(error) => {
                    self.metrics.count_failure();
                    tracing::error!(%error, ?record, "ledger write failed");
                }
            }
        } else if self.is_ledger_missing {
            self.metrics.count_failure();
        }
        if let Err(error) = state.totals.add(record) {
            tracing::error!(%error, "ledger record not accounted for");
        }
        is_recorded
    }

    fn state(&self) -> MutexGuard<'_, LedgerState> {
        // A panic cannot leave the sums inconsistent, so a poisoned lock is used as it is.
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl LedgerState {
    /// Returns the nano-dollars that `payer` has spent today, at this gateway and at others.
    fn spent_by(&self, payer: Payer<'_>, now: u64) -> u64 {
        self.spent_here.spent_by(payer).saturating_add(self.spent_elsewhere.spent_by(payer, now))
    }
}

/// Reason why cost accounting cannot be opened.
#[derive(Debug, thiserror::Error)]
pub enum CostAccountingError {
    /// The ledger cannot be read.
    #[error(transparent)]
    Ledger(#[from] LedgerTotalsError),
    /// A metric of the same name is registered.
    #[error(transparent)]
    Metrics(#[from] prometheus::Error),
}

/// Returns the time in nanoseconds since 1970.
fn now() -> u64 {
    // A u64 holds 584 years of nanoseconds.
    SystemTime::now().duration_since(UNIX_EPOCH).map_or(0, |since| since.as_nanos() as u64)
}

#[cfg(test)]
#[allow(clippy::unwrap_used)]
mod tests {
    use super::*;
    use crate::GatewayMetrics;
    use remoe_billing::{Rate, Share};

    #[test]
    fn function_that_joins_while_a_request_runs_is_paid_for() {
        let metrics = GatewayMetrics::new().unwrap();
        let cost_accounting = CostAccounting::open(None, "p", metrics.registry()).unwrap();
        let billing = |names: &[&str]| Billing {
            // A nano-dollar a nanosecond.
            rates: Rates(names.iter().map(|name| ((*name).to_owned(), Rate(3_600_000_000_000))).collect()),
            functions: names.iter().map(|name| ((*name).into(), ((*name).into(), "tier".into()))).collect(),
            restarts: 0,
        };
        let (sent, now) = (billing(&["main", "a"]), billing(&["main", "b"]));
        let total = |current: Option<&Billing>| {
            let known = Share { cost: Phases { prefill: 1, decode: 2 }, ..Share::default() };
            let new = Share { work: Phases { prefill: 10, decode: 20 }, ..Share::default() };
            let shares = [("main", known.clone()), ("a", known), ("b", new.clone()), ("stranger", new)];
            let shares = shares.map(|(name, share)| (name.to_owned(), share)).into();
            let reported = ReportedCost { shares, rivals: BTreeMap::new(), served: 0 };
            let (prompt_tokens, completion_tokens) = (1, 1);
            let answered = CompletedRequest {
                id: "id",
                model: "m",
                tenant: "t",
                prompt_tokens,
                completion_tokens,
                reported,
            };
            cost_accounting.record_answer(answered, &sent, current).unwrap().total
        };
        assert_eq!((total(None), total(Some(&now))), (6, 36));
    }

    /// Series that a Prometheus keeps of `family`.
    fn samples(family: &prometheus::proto::MetricFamily) -> usize {
        let of_one = |metric: &prometheus::proto::Metric| match family.get_field_type() {
            // The last bucket, which is not written down, the sum and the count.
            prometheus::proto::MetricType::HISTOGRAM => metric.get_histogram().get_bucket().len() + 3,
            _ => 1,
        };
        family.get_metric().iter().map(of_one).sum()
    }

    /// Series of a gateway as stated in docs/cost.md, for a deployment of 58 layers with 256 experts in 16 groups that
    /// 20 tenants use. There are none by layer or expert.
    #[test]
    fn series_are_bounded() {
        const GROUPS: usize = 16;
        const TENANTS: usize = 20;
        let metrics = GatewayMetrics::new().unwrap();
        let cost_accounting = CostAccounting::open(None, "p", metrics.registry()).unwrap();
        let series = || -> usize { metrics.registry().gather().iter().map(samples).sum() };
        let before = series();
        let _model = metrics.of_model("m");
        let without = series();
        // A wake, and the parts of cold starts, each of 12 buckets, the last one, a sum and a count; seven of one
        // sample, and four of groups that sleep: their wakes by cause, how many sleep, what was asked of those.
        assert_eq!(without - before, (1 + 6) * 15 + 7 + 4);
        let tier =
            |number: usize| if number == GROUPS { "main".to_owned() } else { format!("group-{number}") };
        let billing = Billing {
            rates: Rates::default(),
            functions: (0..=GROUPS).map(|number| (tier(number), (tier(number), tier(number)))).collect(),
            restarts: 0,
        };
        for request in 0..10 * TENANTS {
            let share = Share { cost: Phases { prefill: 1, decode: 1 }, ..Share::default() };
            let reported = ReportedCost {
                shares: billing.functions.keys().map(|name| (name.clone(), share.clone())).collect(),
                rivals: ["mix", "cpu", "gpu", "fetch"].map(|rival| (rival.to_owned(), 1)).into(),
                served: 0,
            };
            let tenant = format!("tenant-{}", request % TENANTS);
            metrics.add_tokens("m", &tenant, 1);
            let answered = CompletedRequest {
                id: &format!("id-{request}"),
                model: "m",
                tenant: &tenant,
                prompt_tokens: 1,
                completion_tokens: 1,
                reported,
            };
            let cost = cost_accounting.record_answer(answered, &billing, None).unwrap();
            assert_eq!(cost.total, 2 * (GROUPS as u64 + 1));
            (0..=GROUPS).for_each(|number| cost_accounting.set_current_cost("m", &tier(number), 1, 1));
            let payers = [(Payer::Tenant(&tenant), 1_u64), (Payer::Model("m"), 1)];
            payers.iter().for_each(|(payer, _)| cost_accounting.metrics().count_refusal(*payer));
            cost_accounting.refresh_metrics(payers.into_iter());
        }
        let of_tenant = 2 * (GROUPS + 1) + 1 + 3;
        let of_model = 2 * (GROUPS + 1) + 2 * 4 + 3;
        // The parts of the cost since the gateway started are not broken down by model.
        let parts = 6;
        assert_eq!(series() - without, TENANTS * of_tenant + of_model + parts);
        assert_eq!(TENANTS * of_tenant + of_model, 805);
        assert_eq!(cost_accounting.spent_today(Payer::Model("m")).0, 10 * TENANTS as u64 * 34);
        assert_eq!(cost_accounting.savings("m"), 10 * TENANTS as i64 * (1 - 34));
    }
}
