//! Books of costs by request and tenant: records for the ledger, metrics, and what tenants have spent today.

use crate::cost_metrics::CostMetrics;
use crate::spending::{DAY, DaySpending, OtherGatewaySpending, Payer};
use prometheus::Registry;
use remoe_billing::{
    AccountError, FunctionEvent, FunctionRecord, Ledger, LedgerTotals, LifeChange, Lives, Phases, Rates,
    Record, ReportedCost, RequestCost, RequestRecord, TierCharge, records, records_since,
};
use std::collections::BTreeMap;
use std::sync::{Mutex, MutexGuard, PoisonError};
use std::time::{Duration, SystemTime, UNIX_EPOCH};

/// The functions that answer together for a model, for the ledger.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct Billing {
    /// Rates of the functions.
    pub rates: Rates,
    /// By the names of `rates`: the function, under a name that no other one ever has, and its tier.
    pub functions: BTreeMap<String, (String, String)>,
    /// How often the main function's process was started again under the same name.
    pub restarts: u32,
}

impl Billing {
    /// Name of the main function.
    fn main_function(&self) -> &str {
        self.functions.get("main").map(|(function, _)| function.as_str()).unwrap_or_default()
    }

    /// The main function, as the one that counts its own work.
    pub(crate) fn main(&self) -> String {
        let main = self.main_function();
        if self.restarts == 0 { main.to_owned() } else { format!("{main}#{}", self.restarts) }
    }
}

/// An answer that is about to be complete.
pub struct CompletedRequest<'a> {
    /// As in `x-request-id`.
    pub id: &'a str,
    /// The model's name.
    pub model: &'a str,
    /// Whose request it was; empty where there are no keys.
    pub tenant: &'a str,
    /// Tokens of the prompts.
    pub prompt_tokens: u64,
    /// Tokens of the answer.
    pub completion_tokens: u64,
    /// Costs that the main function reports.
    pub told: ReportedCost,
}

/// Costs as they are reported: of answers by the gateway, of functions by what starts them.
pub struct CostAccounting {
    ledger: Option<Ledger>,
    /// There should be a ledger: each record that there is none for counts as a failure of it.
    should_be_kept: bool,
    metrics: CostMetrics,
    state: Mutex<LedgerState>,
}

struct LedgerState {
    /// Everything since these books were opened.
    account: LedgerTotals,
    spent: DaySpending,
    /// At other gateways that share the budgets.
    elsewhere: OtherGatewaySpending,
}

impl CostAccounting {
    /// Books that are kept in `ledger`, or only as long as this process lives. `prices` says where the prices stand.
    ///
    /// # Errors
    /// The ledger cannot be read, or a metric's name is taken in `registry`.
    pub fn open(
        ledger: Option<Ledger>,
        prices: &str,
        registry: &Registry,
    ) -> Result<Self, CostAccountingError> {
        let now = now();
        let day = now / DAY;
        let mut spent = DaySpending::at(now);
        if let Some(ledger) = &ledger {
            for record in records_since(ledger.folder(), day * DAY).map_err(AccountError::from)? {
                match record.map_err(AccountError::from)? {
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
            account: LedgerTotals::default(),
            spent,
            elsewhere: OtherGatewaySpending::default(),
        };
        let metrics = CostMetrics::new(registry, prices)?;
        let cost_accounting = Self { ledger, should_be_kept: false, metrics, state: Mutex::new(state) };
        cost_accounting.write(&Record::Opened { at: now, prices: prices.to_owned() });
        Ok(cost_accounting)
    }

    /// As these books, for a ledger that was configured and cannot be used: each record counts as a failed write.
    #[must_use]
    pub fn that_should_be_kept(mut self) -> Self {
        self.should_be_kept = true;
        self
    }

    /// Records that a function came to `event` `at` this time, in nanoseconds since 1970 as [`Self::now`].
    pub fn function(&self, at: u64, model: &str, function: &str, event: FunctionEvent) {
        let (model, function) = (model.to_owned(), function.to_owned());
        self.write(&Record::Function(FunctionRecord { at, model, function, event }));
    }

    /// Records `changes` in the lives of the functions of `model`, and shows what an hour of each of its tiers costs now.
    pub fn changed(&self, model: &str, changes: Vec<LifeChange>, lives: &Lives) {
        for LifeChange { at, function, event } in changes {
            self.function(at, model, &function, event);
        }
        for TierCharge { tier, rate, memory_bytes } in lives.charges() {
            self.costs_now(model, &tier, rate.0, memory_bytes);
        }
    }

    /// Nanoseconds since 1970.
    #[must_use]
    pub fn now() -> u64 {
        now()
    }

    /// Records that every function that started and has not stopped is alive, and that gateway and launcher have cost
    /// `overhead` since the last time.
    pub fn alive(&self, overhead: u64) {
        self.write(&Record::Alive { at: now(), overhead });
    }

    /// Sets the metrics of `model` in `tier`: it costs `rate` nano-dollars an hour now, at the price of all that is
    /// alive of it, which has `memory` bytes.
    pub fn costs_now(&self, model: &str, tier: &str, rate: u64, memory: u64) {
        self.metrics.rate(model, tier, rate);
        self.metrics.memory(model, tier, memory);
    }

    /// All that was written so far, added up: of the ledger, or of this process where none is kept.
    ///
    /// # Errors
    /// The ledger cannot be read.
    pub fn added_up(&self) -> Result<LedgerTotals, AccountError> {
        match &self.ledger {
            Some(ledger) => LedgerTotals::of(records(ledger.folder())?),
            None => Ok(self.so_far()),
        }
    }

    /// All since these books were opened, added up until now.
    pub(crate) fn so_far(&self) -> LedgerTotals {
        self.state().account.clone().until(now())
    }

    /// Writes down what a request cost that was sent to the functions of `billing`. Its main function did not know
    /// what those cost that joined it after that; they are priced as in `since`, where they are known. Returns the cost
    /// that was recorded, which is what the client is told. If the ledger did not take the record, returns none.
    pub fn answered(
        &self,
        answered: CompletedRequest<'_>,
        billing: &Billing,
        since: Option<&Billing>,
    ) -> Option<RequestCost> {
        let CompletedRequest { id, model, tenant, prompt_tokens, completion_tokens, told } = answered;
        let shares = told.shares.into_iter().filter_map(|(name, mut share)| {
            let (function, tier) = match (billing.functions.get(&name), since) {
                (Some(known), _) => known,
                (None, Some(since)) => {
                    let rate = since.rates.0.get(&name).copied().unwrap_or_default();
                    let Phases { prefill, decode } = share.work;
                    share.cost = Phases { prefill: rate.cost(prefill), decode: rate.cost(decode) };
                    since.functions.get(&name)?
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
            function: billing.main(),
            prompt_tokens,
            completion_tokens,
            shares: shares.collect(),
            rivals: told.rivals,
            served: told.served,
        };
        let cost = request.cost(billing.main_function());
        self.metrics.answered(&request);
        self.state().spent.add(request.at, model, tenant, cost.total);
        self.write(&Record::Request(request)).then_some(cost)
    }

    /// Records that the request `id` ends without an answer, after `tokens` as far as is known. A function got it at
    /// the time `since` and had it for `had` nanoseconds. The tenant's budget is charged the average cost of so many
    /// tokens of the model's answers, so that a client cannot avoid payment by leaving before the end.
    pub(crate) fn lost(
        &self,
        id: &str,
        model: &str,
        tenant: &str,
        (since, had): (u64, u64),
        tokens: u64,
        billing: &Billing,
    ) {
        let at = now();
        let answered = self.state().account.by_model.get(model).copied().unwrap_or_default();
        let known = u128::from(answered.prompt_tokens) + u128::from(answered.completion_tokens);
        let estimate = match (u128::from(answered.cost) * u128::from(tokens)).checked_div(known) {
            Some(estimate) => u64::try_from(estimate).unwrap_or(u64::MAX),
            None if tokens == 0 => 0,
            // Nothing has been answered yet: what its functions cost while they had it is the most that it can be.
            None => billing.rates.0.values().fold(0_u64, |sum, rate| sum.saturating_add(rate.cost(had))),
        };
        self.state().spent.add(at, model, tenant, estimate);
        let (id, model, tenant) = (id.to_owned(), model.to_owned(), tenant.to_owned());
        self.write(&Record::Lost { at, since, estimate, model, tenant, function: billing.main(), id });
    }

    /// Nano-dollars that the requests of `model` since these books were opened would have cost more with all experts in
    /// the main function; negative where they would have cost less.
    #[must_use]
    pub fn saved(&self, model: &str) -> i64 {
        self.metrics.saved(model, "mix")
    }

    /// Returns what `payers` have spent today at this gateway.
    pub(crate) fn spending<'a>(&self, payers: impl Iterator<Item = Payer<'a>>) -> DaySpending {
        let mut state = self.state();
        state.spent.begin_day(now());
        state.spent.only(payers)
    }

    /// Takes a report of what was spent at another `gateway` that shares the budgets.
    pub(crate) fn spent_elsewhere(&self, gateway: &str, spending: DaySpending) {
        self.state().elsewhere.report(gateway, now(), spending);
    }

    /// Nano-dollars that `payer` has spent today, and how long today lasts.
    pub(crate) fn spent_today(&self, payer: Payer<'_>) -> (u64, Duration) {
        let now = now();
        let mut state = self.state();
        state.spent.begin_day(now);
        (state.spent_by(payer, now), Duration::from_nanos(DAY - now % DAY))
    }

    /// Brings metrics up to date that follow from the clock; `budgets` with what may be spent.
    pub(crate) fn refresh<'a>(&self, budgets: impl Iterator<Item = (Payer<'a>, u64)>) {
        let now = now();
        let mut state = self.state();
        state.spent.begin_day(now);
        for (payer, budget) in budgets {
            self.metrics.budget(payer, budget, state.spent_by(payer, now));
        }
        drop(state);
        self.metrics.account(&self.so_far());
    }

    pub(crate) fn metrics(&self) -> &CostMetrics {
        &self.metrics
    }

    /// Writes `record`, and returns whether it is kept where it should be. Serving goes on where the ledger takes no
    /// more: that is counted, and an alert.
    fn write(&self, record: &Record) -> bool {
        let mut state = self.state();
        let mut is_kept = !self.should_be_kept;
        if let Some(ledger) = &self.ledger {
            let written = ledger.append(record);
            is_kept = written.is_ok();
            match written {
                Ok(()) => self.metrics.wrote(),
                Err(error) => {
                    self.metrics.failed();
                    tracing::error!(%error, ?record, "ledger write failed");
                }
            }
        } else if self.should_be_kept {
            self.metrics.failed();
        }
        if let Err(error) = state.account.add(record) {
            tracing::error!(%error, "ledger record not accounted for");
        }
        is_kept
    }

    fn state(&self) -> MutexGuard<'_, LedgerState> {
        // Sums that are right after every step.
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl LedgerState {
    /// Returns what `payer` has spent today, at this gateway and at others.
    fn spent_by(&self, payer: Payer<'_>, now: u64) -> u64 {
        self.spent.of(payer).saturating_add(self.elsewhere.of(payer, now))
    }
}

/// Why books cannot be opened.
#[derive(Debug, thiserror::Error)]
pub enum CostAccountingError {
    /// The ledger cannot be read.
    #[error(transparent)]
    Ledger(#[from] AccountError),
    /// A metric's name is taken.
    #[error(transparent)]
    Metrics(#[from] prometheus::Error),
}

/// Nanoseconds since 1970.
fn now() -> u64 {
    // 584 years fit.
    SystemTime::now().duration_since(UNIX_EPOCH).map_or(0, |since| since.as_nanos() as u64)
}

#[cfg(test)]
#[allow(clippy::unwrap_used)]
mod tests {
    use super::*;
    use crate::GatewayMetrics;
    use remoe_billing::{Rate, Share};

    #[test]
    fn a_function_that_joins_while_a_request_runs_is_paid_for() {
        let metrics = GatewayMetrics::new().unwrap();
        let cost_accounting = CostAccounting::open(None, "p", metrics.registry()).unwrap();
        let billing = |names: &[&str]| Billing {
            // A nano-dollar a nanosecond.
            rates: Rates(names.iter().map(|name| ((*name).to_owned(), Rate(3_600_000_000_000))).collect()),
            functions: names.iter().map(|name| ((*name).into(), ((*name).into(), "tier".into()))).collect(),
            restarts: 0,
        };
        let (sent, now) = (billing(&["main", "a"]), billing(&["main", "b"]));
        let total = |since: Option<&Billing>| {
            let known = Share { cost: Phases { prefill: 1, decode: 2 }, ..Share::default() };
            let new = Share { work: Phases { prefill: 10, decode: 20 }, ..Share::default() };
            let shares = [("main", known.clone()), ("a", known), ("b", new.clone()), ("stranger", new)];
            let shares = shares.map(|(name, share)| (name.to_owned(), share)).into();
            let told = ReportedCost { shares, rivals: BTreeMap::new(), served: 0 };
            let (prompt_tokens, completion_tokens) = (1, 1);
            let answered = CompletedRequest {
                id: "id",
                model: "m",
                tenant: "t",
                prompt_tokens,
                completion_tokens,
                told,
            };
            cost_accounting.answered(answered, &sent, since).unwrap().total
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
            let told = ReportedCost {
                shares: billing.functions.keys().map(|name| (name.clone(), share.clone())).collect(),
                rivals: ["mix", "cpu", "gpu", "fetch"].map(|rival| (rival.to_owned(), 1)).into(),
                served: 0,
            };
            let tenant = format!("tenant-{}", request % TENANTS);
            metrics.took("m", &tenant, 1);
            let answered = CompletedRequest {
                id: &format!("id-{request}"),
                model: "m",
                tenant: &tenant,
                prompt_tokens: 1,
                completion_tokens: 1,
                told,
            };
            let cost = cost_accounting.answered(answered, &billing, None).unwrap();
            assert_eq!(cost.total, 2 * (GROUPS as u64 + 1));
            (0..=GROUPS).for_each(|number| cost_accounting.costs_now("m", &tier(number), 1, 1));
            let payers = [(Payer::Tenant(&tenant), 1_u64), (Payer::Model("m"), 1)];
            payers.iter().for_each(|(payer, _)| cost_accounting.metrics().refused(*payer));
            cost_accounting.refresh(payers.into_iter());
        }
        let of_tenant = 2 * (GROUPS + 1) + 1 + 3;
        let of_model = 2 * (GROUPS + 1) + 2 * 4 + 3;
        // Where the money went since the gateway started, which is not by model.
        let parts = 6;
        assert_eq!(series() - without, TENANTS * of_tenant + of_model + parts);
        assert_eq!(TENANTS * of_tenant + of_model, 805);
        assert_eq!(cost_accounting.spent_today(Payer::Model("m")).0, 10 * TENANTS as u64 * 34);
        assert_eq!(cost_accounting.saved("m"), 10 * TENANTS as i64 * (1 - 34));
    }
}
