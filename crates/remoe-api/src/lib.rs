//! The custom resources, each declared once: `MoEDeployment`, which users write, `MoEPlan` and `MoERecord`, which the
//! operator writes, and `MoEDemand`, which it shares with gateways.

// The schema macros write helper types as public as the ones that they describe.
#![allow(unreachable_pub)]

mod crds;
mod demand;
mod deployment;
mod document;
mod duration;
mod plan;
mod prediction;
mod record;
mod scaling;
mod sizes;
mod status;
mod workload;

pub use crds::crds;
pub use demand::{
    DemandPhase, FunctionPod, GatewayDemand, GroupDemand, LEASE_LABEL, LEASE_SECONDS, MOST_FUNCTIONS,
    MOST_GATEWAYS, MOST_SHARES, MainFunction, MixOf, MoEDemand, MoEDemandSpec, MoEDemandStatus,
    PredictionOrder, RELEASE_LABEL, RequestLoad, RequestMix, SHOWN_ANNOTATION, WakePlanning, WakeTimeline,
    tier,
};
pub use deployment::{
    Billing, ComputeDtype, DenseDtype, Device, ExpertsDtype, GpuSpec, KvCacheDtype, MainSpec, MoEDeployment,
    MoEDeploymentSpec, Mode, ModelSpec, PodTemplate, PricingSpec, ProfileSpec, RemoteExpertsSpec, RemoteMode,
    RolloutSpec, RolloutStrategy, SloSpec,
};
pub use document::InvalidResource;
pub use duration::Duration;
pub use plan::{
    GroupPlan, MAX_GROUPS, MAX_REPLICAS, MAX_VERDICT, MainPlan, MoEPlan, MoEPlanSpec, PerBaseline, PlanCosts,
    PlanNumbers, PlanTimes, PlanVerdict, PlannedModel, ProfileSource, RemotePlan, ServingWay, ShownNumbers,
    WayCost,
};
pub use prediction::{PlannedPrediction, PredictionSpec, Privacy, Replan};
pub use record::{Generation, MoERecord, MoERecordSpec, RecordOf, RoutedPod, RoutingError};
pub use scaling::{RemoteScalingSpec, ScalingSpec};
pub use sizes::{CpuRange, MemoryRange};
pub use status::{Condition, ConditionType, MoEDeploymentStatus, ModelStatus};
pub use workload::{ArrivalsSpec, WorkloadSpec, default_concurrency};

/// The API group of these resources.
pub const GROUP: &str = "remoe.dev";

/// Set on a `MoEDeployment` to a new value (a time, by custom), it has every function replaced.
pub const RESTARTED_AT: &str = "remoe.dev/restartedAt";

/// Set on a `MoEDeployment` to a new value (a time, by custom), it gives its functions other identities: certificates
/// of before are of no use any more.
pub const IDENTITY_ROTATED_AT: &str = "remoe.dev/identityRotatedAt";
