//! Bill of one request: its tenant, the functions that work for it, and their reported cost.

use crate::body_budget::BudgetHolder;
use crate::cost_accounting::{Billing, CompletedRequest, CostAccounting};
use crate::gateway::Gateway;
use crate::model::{Backend, Model};
use remoe_billing::{Phases, ReportedCost, RequestCost};
use remoe_http::random_id;
use std::fmt::Debug;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex, PoisonError};
use std::time::{Duration, Instant};

/// Bill of a request. If it is dropped before its cost is reported, the request is recorded as lost.
pub(crate) struct Bill {
    pub(crate) gateway: Arc<Gateway>,
    /// Value of `x-request-id`.
    pub(crate) id: Box<str>,
    pub(crate) model: Arc<str>,
    /// Keeps the model, and so its metrics, until the request has ended.
    _model: Arc<Model>,
    pub(crate) tenant: Arc<str>,
    /// Client whose share of the answer budget is used.
    pub(crate) client: Arc<str>,
    /// Set if the client asks for the cost in `x-remoe-cost`.
    pub(crate) is_shown: bool,
    /// Text that main functions write in place of the cost, if the answer's usage is to state it.
    placeholder: Option<Box<str>>,
    /// Time when a backend last got the request; `None` before.
    sent: Mutex<Option<SentTime>>,
    /// Set while a backend works for the request: it has neither reported a cost nor failed.
    is_working: AtomicBool,
    /// Prices of the functions that work for the request, until they have reported the cost.
    open_billing: Mutex<Option<Arc<Billing>>>,
}

/// Time when a backend got a request.
#[derive(Debug, Clone, Copy)]
pub(crate) struct SentTime {
    /// Nanoseconds since 1970, for the ledger.
    at: u64,
    /// Monotonic time of the same moment, for durations: the system clock may be set meanwhile.
    since: Instant,
}

impl SentTime {
    /// Returns the nanoseconds since then.
    fn elapsed_nanoseconds(self) -> u64 {
        u64::try_from(self.since.elapsed().as_nanos()).unwrap_or(u64::MAX)
    }
}

impl Bill {
    pub(crate) fn new(
        gateway: Arc<Gateway>,
        id: &str,
        model: Arc<Model>,
        (tenant, client): (Arc<str>, Arc<str>),
        is_shown: bool,
        is_in_usage: bool,
    ) -> Self {
        let id = id.into();
        // Random, so that no client can have a model write it.
        let placeholder = is_in_usage.then(|| random_id().into());
        Self {
            gateway,
            id,
            model: model.name().into(),
            _model: model,
            tenant,
            client,
            is_shown,
            placeholder,
            sent: Mutex::default(),
            is_working: AtomicBool::new(false),
            open_billing: Mutex::new(None),
        }
    }

    /// Returns the client and the model whose shares of the answer budget are used.
    pub(crate) fn holder(&self) -> BudgetHolder {
        BudgetHolder::answer(&self.client, &self.model)
    }

    /// Returns the text that main functions write in place of the cost, if the answer's usage is to state it.
    pub(crate) fn placeholder(&self) -> Option<&str> {
        self.placeholder.as_deref()
    }

    /// Records that `backend` gets the request, for the first time or again. Returns the time before, for
    /// [`Self::undo_sent`] if the backend cannot be reached.
    pub(crate) fn sent_to(&self, backend: &Backend) -> Option<SentTime> {
        self.replace(backend.billing.clone());
        self.is_working.store(true, Ordering::Relaxed);
        let now = SentTime { at: CostAccounting::now(), since: Instant::now() };
        self.sent.lock().unwrap_or_else(PoisonError::into_inner).replace(now)
    }

    /// Undoes [`Self::sent_to`], for a backend that did not get the request.
    pub(crate) fn undo_sent(&self, before: Option<SentTime>) {
        *self.sent.lock().unwrap_or_else(PoisonError::into_inner) = before;
        self.close_without_cost();
    }

    /// Returns the time when a backend last got the request, in nanoseconds since 1970, and the nanoseconds since
    /// then. Both are 0 before.
    fn sent(&self) -> (u64, u64) {
        let sent = *self.sent.lock().unwrap_or_else(PoisonError::into_inner);
        sent.map_or((0, 0), |sent| (sent.at, sent.elapsed_nanoseconds()))
    }

    /// Reports if a backend works for the request, as far as is known. A client that leaves then pays for that work.
    pub(crate) fn is_backend_working(&self) -> bool {
        self.is_working.load(Ordering::Relaxed)
    }

    /// Reports if functions work for the request whose cost is not reported yet.
    pub(crate) fn is_open(&self) -> bool {
        self.open_billing.lock().unwrap_or_else(PoisonError::into_inner).is_some()
    }

    /// Records the `reported` cost. Returns the cost as the ledger has it, which is what the client is told.
    pub(crate) fn settle(
        &self,
        mut reported: ReportedCost,
        prompt_tokens: u64,
        completion_tokens: u64,
    ) -> Option<RequestCost> {
        let (billing, cost_accounting) = (self.close()?, self.gateway.cost_accounting()?);
        self.bound_report(&mut reported, &billing);
        let (id, model, tenant) = (&*self.id, &*self.model, &*self.tenant);
        let is_new = |name| !billing.functions.contains_key(name);
        let current = if reported.shares.keys().any(is_new) { self.current_billing(&billing) } else { None };
        let request = CompletedRequest { id, model, tenant, prompt_tokens, completion_tokens, reported };
        cost_accounting.record_answer(request, &billing, current.as_deref())
    }

    /// Returns the current prices of the same main function and its remote functions. A new revision may have given it
    /// other remote functions while the request ran.
    fn current_billing(&self, sent: &Billing) -> Option<Arc<Billing>> {
        let models = self.gateway.models();
        let model = models.iter().find(|model| model.name() == &*self.model)?;
        model.billings().into_iter().find(|billing| billing.main_process() == sent.main_process())
    }

    /// Closes the bill of a request that cost nothing: a main function refused it, or it generated nothing.
    pub(crate) fn close_without_cost(&self) {
        self.close();
    }

    /// Records function time without an answer: the request ended after about `tokens`.
    pub(crate) fn record_lost(&self, tokens: u64) {
        if let (Some(billing), Some(cost_accounting)) = (self.close(), self.gateway.cost_accounting()) {
            cost_accounting.record_lost(&self.id, &self.model, &self.tenant, self.sent(), tokens, &billing);
        }
    }

    /// Bounds the `reported` cost. No function can have worked for longer than it has had the request, or cost more
    /// than its price for that time.
    fn bound_report(&self, reported: &mut ReportedCost, billing: &Billing) {
        /// Nanoseconds by which an iteration may have begun before the request arrived.
        const SLACK: u64 = Duration::from_millis(100).as_nanos() as u64;
        /// Divisor of the time: the clocks of two machines drift apart by at most a thousandth (Linux slews each by
        /// 500 ppm).
        const DRIFT: u64 = 1000;
        let (_, elapsed) = self.sent();
        let max_time = elapsed.saturating_add(elapsed / DRIFT).saturating_add(SLACK);
        for (name, share) in &mut reported.shares {
            // Cost accounting prices functions that have no price here, or leaves them out.
            let max_cost = billing.rates.0.get(name).map_or(0, |rate| rate.cost(max_time));
            for (what, phases, max) in
                [("work", &mut share.work, max_time), ("cost", &mut share.cost, max_cost)]
            {
                let prefill = phases.prefill.min(max);
                let bounded = Phases { prefill, decode: phases.decode.min(max - prefill) };
                if *phases != bounded {
                    self.report_implausible(what, phases, &bounded);
                    *phases = bounded;
                }
            }
        }
        self.bound_rivals(reported);
    }

    /// Bounds the counterfactual costs in `reported`: their names, and their amounts by the cost of the request.
    fn bound_rivals(&self, reported: &mut ReportedCost) {
        /// Largest counterfactual cost as a multiple of the request's cost.
        const MAX_RATIO: u64 = 1000;
        /// Counterfactual cost that is always plausible, a dollar in nano-dollars: requests can be free.
        const ALWAYS_PLAUSIBLE: u64 = 1_000_000_000;
        let cost = reported.shares.values().fold(0_u64, |sum, share| sum.saturating_add(share.cost.sum()));
        let (max, names) = (cost.saturating_mul(MAX_RATIO).max(ALWAYS_PLAUSIBLE), reported.rivals.len());
        let removed = reported.bound_rivals(max);
        if removed > 0 {
            self.report_implausible("rivals", &names, &(names - removed));
        }
    }

    /// Counts a usage record of a function that cannot be true. Logs the first one of a model.
    pub(crate) fn report_implausible(
        &self,
        what: &'static str,
        reported: &impl Debug,
        believed: &impl Debug,
    ) {
        if self.gateway.metrics().count_implausible(&self.model, what) {
            tracing::warn!(
                model = &*self.model,
                what,
                told = ?reported,
                ?believed,
                "implausible usage record from a function; further ones are only counted"
            );
        }
    }

    fn close(&self) -> Option<Arc<Billing>> {
        self.is_working.store(false, Ordering::Relaxed);
        self.replace(None)
    }

    fn replace(&self, open_billing: Option<Arc<Billing>>) -> Option<Arc<Billing>> {
        std::mem::replace(
            &mut *self.open_billing.lock().unwrap_or_else(PoisonError::into_inner),
            open_billing,
        )
    }
}

impl Drop for Bill {
    fn drop(&mut self) {
        self.record_lost(0);
    }
}

#[cfg(test)]
#[allow(clippy::unwrap_used)]
mod tests {
    use super::*;
    use crate::gateway::GatewayOptions;
    use crate::model::ModelOptions;
    use crate::{GatewayMetrics, PrefixIndex};
    use remoe_billing::{Rate, Rates, Share};
    use std::time::Duration;

    const HOUR: u64 = 3_600_000_000_000;

    fn series(metrics: &GatewayMetrics, name: &str) -> usize {
        let families = metrics.registry().gather();
        families.iter().filter(|family| family.name() == name).map(|family| family.get_metric().len()).sum()
    }

    /// A main function reports absurd costs for its functions and for 20,000 counterfactuals. Each is bounded by its
    /// price for the elapsed time.
    #[test]
    fn absurd_costs_are_bounded_and_counted() {
        let metrics = GatewayMetrics::new().unwrap();
        let cost_accounting = Arc::new(CostAccounting::open(None, "p", metrics.registry()).unwrap());
        let options = ModelOptions {
            name: "m".to_owned(),
            short_names: Vec::new(),
            context_length: 64,
            max_requests: 1,
            waiting_bytes: 1,
            wake_limit: Duration::from_secs(1),
        };
        let model = Model::new(options, &metrics, &PrefixIndex::default());
        let options = GatewayOptions { cost_accounting: Some(cost_accounting), ..GatewayOptions::default() };
        let gateway = Gateway::new(options, vec![model.clone()], metrics.clone());
        let functions = ["main", "a:1", "unpriced"].map(|name| (name.into(), (name.into(), name.into())));
        let backend = Backend {
            id: 1,
            address: ([127, 0, 0, 1], 1).into(),
            identity: None,
            capacity: 1,
            authorization: None,
            billing: Some(Arc::new(Billing {
                // A nano-dollar a nanosecond.
                rates: Rates(["main", "a:1"].map(|name| (name.to_owned(), Rate(HOUR))).into()),
                functions: functions.into(),
                restarts: 0,
            })),
        };
        for _ in 0..3 {
            let started = Instant::now();
            let bill =
                Bill::new(gateway.clone(), "id", model.clone(), ("t".into(), "t".into()), false, false);
            bill.sent_to(&backend);
            let max_phases = Phases { prefill: u64::MAX, decode: u64::MAX };
            let share = Share { work: max_phases, cost: max_phases, busy: u64::MAX, ..Share::default() };
            let names = (0..20_000).map(|number| (format!("rival-{number}"), u64::MAX));
            let reported = ReportedCost {
                shares: ["main", "a:1", "unpriced", "stranger"]
                    .map(|name| (name.to_owned(), share.clone()))
                    .into(),
                rivals: names.chain([("mix".to_owned(), u64::MAX)]).collect(),
                served: u64::MAX,
            };
            let cost = bill.settle(reported, 1, 1).unwrap();
            // Two functions with a price, for as long as they had it.
            let max_cost = started.elapsed().as_nanos() as u64;
            let max_cost = 2 * (max_cost + max_cost / 1000 + 100_000_000);
            assert!((200_000_000..=max_cost).contains(&cost.total), "{cost:?}");
            assert_eq!(cost.rivals.keys().collect::<Vec<_>>(), ["mix"]);
            assert!(cost.rivals["mix"] <= (1000 * max_cost).max(1_000_000_000), "{cost:?}");
        }
        assert_eq!(series(&metrics, "remoe_cost_rival_nanodollars_total"), 1);
        assert_eq!(series(&metrics, "remoe_gateway_implausible_usage_total"), 3);
        assert!(!metrics.count_implausible("m", "rivals"), "it was counted");
    }

    #[test]
    fn series_of_a_model_end_with_its_last_request() {
        let metrics = GatewayMetrics::new().unwrap();
        let cost_accounting = Arc::new(CostAccounting::open(None, "p", metrics.registry()).unwrap());
        let options =
            GatewayOptions { cost_accounting: Some(cost_accounting.clone()), ..GatewayOptions::default() };
        let gateway = Gateway::new(options, Vec::new(), metrics.clone());
        let all =
            || metrics.registry().gather().iter().map(|family| family.get_metric().len()).sum::<usize>();
        let before = all();
        let model = |name: String| {
            let options = ModelOptions {
                name,
                short_names: Vec::new(),
                context_length: 64,
                max_requests: 1,
                waiting_bytes: 1,
                wake_limit: Duration::from_secs(1),
            };
            Model::new(options, &metrics, &PrefixIndex::default())
        };
        for number in 0..200 {
            let model = model(format!("m{number}"));
            gateway.replace_models(vec![model.clone()]);
            cost_accounting.set_current_cost(model.name(), "main", 1, 1);
            metrics.add_tokens(model.name(), "t", 1);
            assert!(all() > before + 20);
        }
        // Another model of the same name follows while a request to the first one runs.
        let (first, second) = (model("m".to_owned()), model("m".to_owned()));
        let bill = Bill::new(gateway.clone(), "id", first.clone(), ("t".into(), "t".into()), false, false);
        gateway.replace_models(vec![first]);
        gateway.replace_models(vec![second]);
        let of_one = all() - before;
        assert!(of_one < 40, "{of_one} series");
        gateway.replace_models(Vec::new());
        bill.gateway.metrics().add_tokens(&bill.model, &bill.tenant, 1);
        assert_eq!(all(), before + of_one + 1);
        drop(bill);
        gateway.remove_gone_models();
        assert_eq!(all(), before);
    }

    /// A model of the same name may be made while the series of the previous one are removed, before it is published.
    #[test]
    fn series_of_a_recreated_model_remain() {
        let metrics = GatewayMetrics::new().unwrap();
        let gateway = Gateway::new(GatewayOptions::default(), Vec::new(), metrics.clone());
        let series = || series(&metrics, "remoe_gateway_model_awake");
        let first = metrics.of_model("m");
        drop(first);
        let second = metrics.of_model("m");
        gateway.remove_gone_models();
        assert_eq!(series(), 1);
        // One that was never published is removed as well.
        drop(second);
        gateway.remove_gone_models();
        assert_eq!(series(), 0);
    }
}
