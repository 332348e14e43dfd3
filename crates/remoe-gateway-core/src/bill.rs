//! The bill of one request: its tenant, and which functions work for it.

use crate::body_budget::Holder;
use crate::cost_accounting::{Billing, CompletedRequest, CostAccounting};
use crate::gateway::Gateway;
use crate::model::{Backend, Model};
use remoe_billing::{Phases, ReportedCost, RequestCost};
use remoe_http::random_id;
use std::fmt::Debug;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex, PoisonError};
use std::time::{Duration, Instant};

/// A request that functions may work for.
pub(crate) struct Bill {
    pub(crate) gateway: Arc<Gateway>,
    /// As in `x-request-id`.
    pub(crate) id: Box<str>,
    pub(crate) model: Arc<str>,
    /// The model is there as long as anything is said of it.
    _model: Arc<Model>,
    pub(crate) tenant: Arc<str>,
    /// Client that shares of room are counted for.
    pub(crate) client: Arc<str>,
    /// The client wants to see what it cost.
    pub(crate) is_shown: bool,
    /// Placeholder that main functions write in place of the cost, if the answer's usage is to state it.
    placeholder: Option<Box<str>>,
    /// When a backend got it last; none before.
    sent: Mutex<Option<Sent>>,
    /// A backend has it, and has neither told what it took nor broken off.
    owed: AtomicBool,
    /// The functions that work for it, until they have told what that cost.
    open: Mutex<Option<Arc<Billing>>>,
}

/// When a backend got a request.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Sent {
    /// In nanoseconds since 1970, for the ledger.
    at: u64,
    /// For how long it has had it: clocks may be set meanwhile.
    since: Instant,
}

impl Sent {
    /// Nanoseconds that the backend has had it.
    fn had(self) -> u64 {
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
        // Clients cannot foresee it, nor have a model write it.
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
            owed: AtomicBool::new(false),
            open: Mutex::new(None),
        }
    }

    /// Returns the holder of room for its answer.
    pub(crate) fn holder(&self) -> Holder {
        Holder::answer(&self.client, &self.model)
    }

    /// Returns what main functions write in place of the cost, if the answer's usage is to state it.
    pub(crate) fn placeholder(&self) -> Option<&str> {
        self.placeholder.as_deref()
    }

    /// Notes that `backend` gets the request, or gets it again. Returns what [`Self::not_sent`] takes if it cannot be
    /// reached.
    pub(crate) fn sent_to(&self, backend: &Backend) -> Option<Sent> {
        self.replace(backend.billing.clone());
        self.owed.store(true, Ordering::Relaxed);
        let now = Sent { at: CostAccounting::now(), since: Instant::now() };
        self.sent.lock().unwrap_or_else(PoisonError::into_inner).replace(now)
    }

    /// Undoes [`Self::sent_to`], for a backend that did not get the request.
    pub(crate) fn not_sent(&self, before: Option<Sent>) {
        *self.sent.lock().unwrap_or_else(PoisonError::into_inner) = before;
        self.void();
    }

    /// Returns when a backend got it last, in nanoseconds since 1970, and for how many it has had it; zeros before.
    fn sent(&self) -> (u64, u64) {
        let sent = *self.sent.lock().unwrap_or_else(PoisonError::into_inner);
        sent.map_or((0, 0), |sent| (sent.at, sent.had()))
    }

    /// Reports if a backend works for the request, as far as is known. A client that leaves then owes what the backend
    /// did.
    pub(crate) fn is_owed(&self) -> bool {
        self.owed.load(Ordering::Relaxed)
    }

    /// Reports if functions work for the request and have not told what that cost.
    pub(crate) fn is_open(&self) -> bool {
        self.open.lock().unwrap_or_else(PoisonError::into_inner).is_some()
    }

    /// It cost what was `told`. Returns the cost as it is in the ledger: nothing else is told to the client.
    pub(crate) fn settle(
        &self,
        mut told: ReportedCost,
        prompt_tokens: u64,
        completion_tokens: u64,
    ) -> Option<RequestCost> {
        let (billing, cost_accounting) = (self.close()?, self.gateway.cost_accounting()?);
        self.bound(&mut told, &billing);
        let (id, model, tenant) = (&*self.id, &*self.model, &*self.tenant);
        let is_new = |name| !billing.functions.contains_key(name);
        let since = if told.shares.keys().any(is_new) { self.since(&billing) } else { None };
        let answered = CompletedRequest { id, model, tenant, prompt_tokens, completion_tokens, told };
        cost_accounting.answered(answered, &billing, since.as_deref())
    }

    /// Returns the current rates of the same main function: a revision may have given it other remote functions while
    /// the request ran.
    fn since(&self, sent: &Billing) -> Option<Arc<Billing>> {
        let models = self.gateway.models();
        let model = models.iter().find(|model| model.name() == &*self.model)?;
        model.billings().into_iter().find(|billing| billing.main() == sent.main())
    }

    /// Closes the bill of a request that owes nothing: it was refused, or generates nothing.
    pub(crate) fn void(&self) {
        self.close();
    }

    /// Records work of functions that was wasted: the client leaves after about `tokens`.
    pub(crate) fn lost(&self, tokens: u64) {
        if let (Some(billing), Some(cost_accounting)) = (self.close(), self.gateway.cost_accounting()) {
            cost_accounting.lost(&self.id, &self.model, &self.tenant, self.sent(), tokens, &billing);
        }
    }

    /// Bounds what was `told`. No function can have worked for the request for longer than it has had it, or cost more
    /// than its price for that time.
    fn bound(&self, told: &mut ReportedCost, billing: &Billing) {
        /// An iteration may have begun this long before the request came.
        const SLACK: u64 = Duration::from_millis(100).as_nanos() as u64;
        /// Clocks of two machines differ by at most this part of the time (Linux slews them by 500 ppm).
        const DRIFT: u64 = 1000;
        let (_, had) = self.sent();
        let had = had.saturating_add(had / DRIFT).saturating_add(SLACK);
        for (name, share) in &mut told.shares {
            // Functions without a price are priced, or left out, by the books.
            let price = billing.rates.0.get(name).map_or(0, |rate| rate.cost(had));
            for (what, told, most) in [("work", &mut share.work, had), ("cost", &mut share.cost, price)] {
                let prefill = told.prefill.min(most);
                let believed = Phases { prefill, decode: told.decode.min(most - prefill) };
                if *told != believed {
                    self.implausible(what, told, &believed);
                    *told = believed;
                }
            }
        }
        self.bound_rivals(told);
    }

    /// Bounds the counterfactual costs that were `told`: names, and amounts by the cost of the request.
    fn bound_rivals(&self, told: &mut ReportedCost) {
        /// A rival costs at most so many times what the request did ..
        const RATIO: u64 = 1000;
        /// .. or a dollar: requests can be free.
        const LEAST: u64 = 1_000_000_000;
        let cost = told.shares.values().fold(0_u64, |sum, share| sum.saturating_add(share.cost.sum()));
        let (most, names) = (cost.saturating_mul(RATIO).max(LEAST), told.rivals.len());
        let wrong = told.bound_rivals(most);
        if wrong > 0 {
            self.implausible("rivals", &names, &(names - wrong));
        }
    }

    /// Counts a usage record of a function that cannot be true. The first one of a model is logged.
    pub(crate) fn implausible(&self, what: &'static str, told: &impl Debug, believed: &impl Debug) {
        if self.gateway.metrics().implausible(&self.model, what) {
            tracing::warn!(
                model = &*self.model,
                what,
                ?told,
                ?believed,
                "implausible usage record from a function; further ones are only counted"
            );
        }
    }

    fn close(&self) -> Option<Arc<Billing>> {
        self.owed.store(false, Ordering::Relaxed);
        self.replace(None)
    }

    fn replace(&self, open: Option<Arc<Billing>>) -> Option<Arc<Billing>> {
        std::mem::replace(&mut *self.open.lock().unwrap_or_else(PoisonError::into_inner), open)
    }
}

impl Drop for Bill {
    fn drop(&mut self) {
        self.lost(0);
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

    /// A main function tells absurd costs of its functions and of 20,000 rivals. Its price for the time it had is
    /// believed.
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
            let begun = Instant::now();
            let bill =
                Bill::new(gateway.clone(), "id", model.clone(), ("t".into(), "t".into()), false, false);
            bill.sent_to(&backend);
            let most = Phases { prefill: u64::MAX, decode: u64::MAX };
            let share = Share { work: most, cost: most, busy: u64::MAX, ..Share::default() };
            let names = (0..20_000).map(|number| (format!("rival-{number}"), u64::MAX));
            let told = ReportedCost {
                shares: ["main", "a:1", "unpriced", "stranger"]
                    .map(|name| (name.to_owned(), share.clone()))
                    .into(),
                rivals: names.chain([("mix".to_owned(), u64::MAX)]).collect(),
                served: u64::MAX,
            };
            let cost = bill.settle(told, 1, 1).unwrap();
            // Two functions with a price, for as long as they had it.
            let most = begun.elapsed().as_nanos() as u64;
            let most = 2 * (most + most / 1000 + 100_000_000);
            assert!((200_000_000..=most).contains(&cost.total), "{cost:?}");
            assert_eq!(cost.rivals.keys().collect::<Vec<_>>(), ["mix"]);
            assert!(cost.rivals["mix"] <= (1000 * most).max(1_000_000_000), "{cost:?}");
        }
        assert_eq!(series(&metrics, "remoe_cost_rival_nanodollars_total"), 1);
        assert_eq!(series(&metrics, "remoe_gateway_implausible_usage_total"), 3);
        assert!(!metrics.implausible("m", "rivals"), "it was counted");
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
            cost_accounting.costs_now(model.name(), "main", 1, 1);
            metrics.took(model.name(), "t", 1);
            assert!(all() > before + 20);
        }
        // One of the same name follows, and a request to the first one is not over.
        let (first, second) = (model("m".to_owned()), model("m".to_owned()));
        let bill = Bill::new(gateway.clone(), "id", first.clone(), ("t".into(), "t".into()), false, false);
        gateway.replace_models(vec![first]);
        gateway.replace_models(vec![second]);
        let of_one = all() - before;
        assert!(of_one < 40, "{of_one} series");
        gateway.replace_models(Vec::new());
        bill.gateway.metrics().took(&bill.model, &bill.tenant, 1);
        assert_eq!(all(), before + of_one + 1);
        drop(bill);
        gateway.forget_gone();
        assert_eq!(all(), before);
    }

    /// A model may come back before it is published, while the series of the one before are removed.
    #[test]
    fn series_of_a_model_that_comes_back_stay() {
        let metrics = GatewayMetrics::new().unwrap();
        let gateway = Gateway::new(GatewayOptions::default(), Vec::new(), metrics.clone());
        let series = || series(&metrics, "remoe_gateway_model_awake");
        let first = metrics.of_model("m");
        drop(first);
        let second = metrics.of_model("m");
        gateway.forget_gone();
        assert_eq!(series(), 1);
        // One that was never published is removed as well.
        drop(second);
        gateway.forget_gone();
        assert_eq!(series(), 0);
    }
}
