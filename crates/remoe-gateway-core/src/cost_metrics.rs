//! Metrics of costs, in nano-dollars. The number of series is bounded: labels are models, tenants and groups of the
//! deployment.

use crate::metrics::remove_series;
use crate::spending::Payer;
use prometheus::{Gauge, IntCounter, IntCounterVec, IntGauge, IntGaugeVec, Opts, Registry};
use remoe_billing::{LedgerTotals, RequestRecord};

/// Metrics of costs, budgets and the ledger.
pub(crate) struct CostMetrics {
    requests: IntCounterVec,
    rivals: IntCounterVec,
    compared: IntCounterVec,
    rates: IntGaugeVec,
    memory: IntGaugeVec,
    spent: IntGaugeVec,
    paid: IntGauge,
    residual: IntGauge,
    estimated: Gauge,
    budget: IntGaugeVec,
    budget_spent: IntGaugeVec,
    budget_refusals: IntCounterVec,
    written: IntCounter,
    failures: IntCounter,
}

impl CostMetrics {
    /// Registers the metrics in `registry`. `prices` names the source of the prices.
    pub(crate) fn new(registry: &Registry, prices: &str) -> Result<Self, prometheus::Error> {
        let counters = |name: &str, help: &str, labels: &[&str]| {
            let counters = IntCounterVec::new(Opts::new(name, help), labels)?;
            registry.register(Box::new(counters.clone())).map(|()| counters)
        };
        let gauges = |name: &str, help: &str, labels: &[&str]| {
            let gauges = IntGaugeVec::new(Opts::new(name, help), labels)?;
            registry.register(Box::new(gauges.clone())).map(|()| gauges)
        };
        let counter = |name: &str, help: &str| {
            let counter = IntCounter::new(name, help)?;
            registry.register(Box::new(counter.clone())).map(|()| counter)
        };
        let gauge = |name: &str, help: &str| {
            let gauge = IntGauge::new(name, help)?;
            registry.register(Box::new(gauge.clone())).map(|()| gauge)
        };
        gauges("remoe_price_info", "Always 1; the label source names the price list.", &["source"])?
            .with_label_values(&[prices])
            .set(1);
        Ok(Self {
            requests: counters(
                "remoe_cost_nanodollars_total",
                "Cost of answered requests: their shares of function time at its price.",
                &["model", "tenant", "tier", "phase"],
            )?,
            rivals: counters(
                "remoe_cost_rival_nanodollars_total",
                "Counterfactual cost of the same requests without remote experts, on the same basis.",
                &["model", "rival"],
            )?,
            compared: counters(
                "remoe_cost_compared_nanodollars_total",
                "Actual cost of the requests compared in remoe_cost_rival_nanodollars_total.",
                &["model", "rival"],
            )?,
            rates: gauges(
                "remoe_cost_rate_nanodollars_per_hour",
                "Price of the functions that are alive, per hour; 0 while a model sleeps.",
                &["model", "tier"],
            )?,
            memory: gauges(
                "remoe_tier_memory_bytes",
                "Memory given to the functions that are alive; 0 while a model sleeps.",
                &["model", "tier"],
            )?,
            spent: gauges(
                "remoe_cost_spent_nanodollars",
                "Accounted cost since the gateway started, by part: requests, failed, idle, cold_start, overlap, overhead.",
                &["part"],
            )?,
            paid: gauge(
                "remoe_cost_paid_nanodollars",
                "Cost of all function time since the gateway started, and of the gateway itself.",
            )?,
            residual: gauge(
                "remoe_cost_residual_nanodollars",
                "Paid minus accounted cost: the difference of two clocks.",
            )?,
            estimated: {
                let estimated = Gauge::new(
                    "remoe_cost_estimated_seconds",
                    "Time of functions whose end was not observed; they may have lived longer than they were paid for.",
                )?;
                registry.register(Box::new(estimated.clone())).map(|()| estimated)?
            },
            budget: gauges(
                "remoe_budget_nanodollars_per_day",
                "Daily budget (UTC) of a tenant, or of all requests of a model.",
                &["model", "tenant"],
            )?,
            budget_spent: gauges(
                "remoe_budget_spent_nanodollars",
                "Spending of a budget today (UTC).",
                &["model", "tenant"],
            )?,
            budget_refusals: counters(
                "remoe_budget_refusals_total",
                "Requests refused because the daily budget of their tenant or model was exhausted.",
                &["model", "tenant"],
            )?,
            written: counter("remoe_ledger_records_total", "Records written to the ledger.")?,
            failures: counter(
                "remoe_ledger_failures_total",
                "Records that could not be written to the ledger.",
            )?,
        })
    }

    pub(crate) fn add_request(&self, request: &RequestRecord) {
        let RequestRecord { model, tenant, .. } = request;
        for share in request.shares.values() {
            let labels = |phase| [model.as_str(), tenant.as_str(), share.tier.as_str(), phase];
            self.requests.with_label_values(&labels("prefill")).inc_by(share.cost.prefill);
            self.requests.with_label_values(&labels("decode")).inc_by(share.cost.decode);
        }
        for (rival, cost) in &request.rivals {
            let labels = [model.as_str(), rival.as_str()];
            self.rivals.with_label_values(&labels).inc_by(*cost);
            self.compared.with_label_values(&labels).inc_by(request.total());
        }
    }

    pub(crate) fn set_rate(&self, model: &str, tier: &str, rate: u64) {
        self.rates.with_label_values(&[model, tier]).set(signed(rate));
    }

    pub(crate) fn set_memory(&self, model: &str, tier: &str, bytes: u64) {
        self.memory.with_label_values(&[model, tier]).set(signed(bytes));
    }

    pub(crate) fn set_totals(&self, totals: &LedgerTotals) {
        let parts = [
            ("requests", totals.answered.cost),
            ("failed", totals.failed),
            ("idle", totals.idle),
            ("cold_start", totals.cold_start),
            ("overlap", totals.overlap),
            ("overhead", totals.overhead),
        ];
        for (part, amount) in parts {
            self.spent.with_label_values(&[part]).set(signed(amount));
        }
        self.paid.set(signed(totals.paid));
        self.residual.set(totals.residual);
        self.estimated.set(totals.estimated as f64 / 1e9);
    }

    pub(crate) fn set_budget(&self, payer: Payer<'_>, budget: u64, spent: u64) {
        self.budget.with_label_values(&labels(payer)).set(signed(budget));
        self.budget_spent.with_label_values(&labels(payer)).set(signed(spent));
    }

    pub(crate) fn count_refusal(&self, payer: Payer<'_>) {
        self.budget_refusals.with_label_values(&labels(payer)).inc();
    }

    /// Returns the nano-dollars that the requests of `model` would have cost more by the counterfactual `rival`.
    pub(crate) fn savings(&self, model: &str, rival: &str) -> i64 {
        let value = |counters: &IntCounterVec| signed(counters.with_label_values(&[model, rival]).get());
        value(&self.rivals).saturating_sub(value(&self.compared))
    }

    /// Removes the series of `model`. Series of tenants' budgets stay: their label `model` is empty.
    pub(crate) fn remove_model(&self, model: &str) {
        for counters in [&self.requests, &self.rivals, &self.compared, &self.budget_refusals] {
            remove_series(counters, model);
        }
        for gauges in [&self.rates, &self.memory, &self.budget, &self.budget_spent] {
            remove_series(gauges, model);
        }
    }

    pub(crate) fn count_write(&self) {
        self.written.inc();
    }

    pub(crate) fn count_failure(&self) {
        self.failures.inc();
    }
}

/// Returns the labels `model` and `tenant` of a payer's budget; one of them is empty.
fn labels(payer: Payer<'_>) -> [&str; 2] {
    match payer {
        Payer::Tenant(tenant) => ["", tenant],
        Payer::Model(model) => [model, ""],
    }
}

fn signed(amount: u64) -> i64 {
    i64::try_from(amount).unwrap_or(i64::MAX)
}
