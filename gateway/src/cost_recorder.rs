//! Ledger records of a deployment's pods: when they start, serve and end, and their prices, as the operator states
//! them.

use k8s_openapi::apimachinery::pkg::apis::meta::v1::MicroTime;
use remoe_api::{FunctionPod, MainFunction, MoEDemandSpec};
use remoe_billing::{Basis, FunctionLives, PresentFunction, Rate};
use remoe_gateway_core::{Billing, CostAccounting};
use std::sync::Arc;

/// Writer of ledger records for the pods of one deployment.
pub(crate) struct CostRecorder {
    cost_accounting: Arc<CostAccounting>,
    model: String,
    /// Living pods by their uids.
    lives: FunctionLives,
}

impl CostRecorder {
    /// Makes the recorder for the deployment `model`.
    pub(crate) fn new(cost_accounting: Arc<CostAccounting>, model: &str) -> Self {
        Self { cost_accounting, model: model.to_owned(), lives: FunctionLives::default() }
    }

    /// Records changes since the last call. `functions` are the deployment's pods now. A pod that is missing is
    /// recorded as ended now.
    pub(crate) fn observe_pods(&mut self, functions: &[FunctionPod]) {
        let present =
            functions.iter().map(|function| (function.uid.clone(), present_function(function))).collect();
        let changes = self.lives.observe(CostAccounting::now(), present);
        self.cost_accounting.record_life_changes(&self.model, changes, &self.lives);
    }
}

fn present_function(function: &FunctionPod) -> PresentFunction {
    PresentFunction {
        tier: function.tier.clone(),
        rate: Rate(function.rate),
        basis: if function.per_work { Basis::Work } else { Basis::Alive },
        memory_bytes: function.memory,
        started: nanoseconds(&function.started),
        serving: function.serving.as_ref().map(nanoseconds),
        replaced: function.replaced.as_ref().map(nanoseconds),
    }
}

/// Returns the prices of `main` and its remote functions, by the names that `main` uses for them. Returns `None` if
/// the price of `main` is unknown.
pub(crate) fn billing(demand: &MoEDemandSpec, main: &MainFunction) -> Option<Arc<Billing>> {
    let mut billing = Billing::default();
    for function in &demand.functions {
        let name = match &function.address {
            Some(address) => address.clone(),
            None if function.uid == main.uid => {
                billing.restarts = function.restarts;
                "main".to_owned()
            }
            None => continue,
        };
        billing.rates.0.insert(name.clone(), Rate(function.rate));
        billing.functions.insert(name, (function.uid.clone(), function.tier.clone()));
    }
    billing.functions.contains_key("main").then(|| Arc::new(billing))
}

/// Returns `time` in nanoseconds since 1970.
fn nanoseconds(time: &MicroTime) -> u64 {
    u64::try_from(time.0.as_nanosecond()).unwrap_or(0)
}

#[cfg(test)]
#[allow(clippy::unwrap_used)]
mod tests {
    use super::*;
    use prometheus::Registry;
    use remoe_api::DemandPhase;

    const START: i64 = 1_700_000_000;

    fn time(second: i64) -> MicroTime {
        MicroTime(jiff::Timestamp::from_second(START + second).unwrap())
    }

    fn pod(uid: &str, address: Option<&str>, rate: u64) -> FunctionPod {
        FunctionPod {
            uid: uid.to_owned(),
            pod: uid.to_owned(),
            tier: if address.is_some() { "group-0" } else { "main" }.to_owned(),
            address: address.map(str::to_owned),
            restarts: 0,
            rate,
            memory: 0,
            per_work: false,
            started: time(0),
            serving: Some(time(2)),
            replaced: None,
        }
    }

    #[test]
    fn pods_cost_money_until_they_are_deleted() {
        let cost_accounting = Arc::new(CostAccounting::open(None, "p", &Registry::new()).unwrap());
        let mut recorder = CostRecorder::new(cost_accounting.clone(), "ns/m");
        let hour = 3_600_000_000_000;
        let (main, far) = (pod("a", None, hour), pod("b", Some("10.0.0.2:9001"), hour));
        recorder.observe_pods(&[main.clone(), far.clone()]);
        recorder.observe_pods(&[main.clone(), far.clone()]);
        let now = cost_accounting.totals().unwrap();
        assert_eq!((now.alive, now.per_hour), (2, 2 * hour));
        let replaced = FunctionPod { replaced: Some(time(100)), ..far };
        recorder.observe_pods(&[main, replaced]);
        recorder.observe_pods(&[]);
        let before = CostAccounting::now();
        let account = cost_accounting.totals().unwrap();
        assert_eq!((account.alive, account.per_hour, account.residual), (0, 0, 0));
        // A nano-dollar a nanosecond: both lived from their start until now.
        let lived = before - START as u64 * 1_000_000_000;
        assert!(account.paid <= 2 * lived && account.paid > 2 * (lived - 60_000_000_000), "{account:?}");
        assert!(
            account.overlap > lived - 160_000_000_000 && account.cold_start == 4_000_000_000,
            "{account:?}"
        );
    }

    #[test]
    fn main_function_is_billed_with_its_remote_functions() {
        let demand = MoEDemandSpec {
            served_name: String::new(),
            context_length: 0,
            phase: DemandPhase::Active,
            turn: 0,
            since: time(0),
            wakes: 0,
            wake_told: 0,
            planning: None,
            sleeps: false,
            follows_load: false,
            mains: Vec::new(),
            groups: Vec::new(),
            prediction: None,
            functions: vec![pod("a", None, 5), pod("b", Some("10.0.0.2:9001"), 7), pod("c", None, 5)],
        };
        let main = |uid: &str| MainFunction {
            uid: uid.to_owned(),
            pod: uid.to_owned(),
            address: "10.0.0.1:8000".to_owned(),
            identity: None,
            room: 1,
        };
        let billing = |uid| super::billing(&demand, &main(uid));
        assert_eq!(billing("c").unwrap().rates.to_string(), "10.0.0.2:9001=7;main=5");
        assert_eq!(billing("c").unwrap().functions["main"], ("c".to_owned(), "main".to_owned()));
        assert_eq!(billing("unknown"), None);
    }
}
