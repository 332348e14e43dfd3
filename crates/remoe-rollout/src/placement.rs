//! Which experts are remote, and which remote process hosts which of them. Pure.

mod plan_file;

use remoe_proto::v1::LayerExperts;
use std::collections::{BTreeMap, BTreeSet};

/// A Mixture-of-Experts layer of the model.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct MoeLayer {
    /// The model's own layer id.
    pub layer: u32,
    /// Number of routed experts of the layer.
    pub experts: u32,
}

/// The remote experts of every layer that has any.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct Placement {
    layers: Vec<RemoteSet>,
    groups: Vec<RemoteGroup>,
    revision: u32,
}

/// Remote experts of one layer, hosted as a whole by each of its replicas.
#[derive(Debug, Clone, PartialEq, Eq)]
struct RemoteSet {
    experts: LayerExperts,
    replicas: u32,
    /// Memory of each replica, if the plan gives it.
    memory_bytes: Option<u64>,
}

/// Remote experts of any layers, hosted as a whole by each of its replicas. No expert is in two groups.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
struct RemoteGroup {
    /// Layers and experts ascending.
    hosted: Vec<LayerExperts>,
    replicas: u32,
    /// Memory of each replica, if the plan gives it.
    memory_bytes: Option<u64>,
    /// CPU of each replica in thousandths of a vCPU, if the plan gives it and it is not what comes with the memory.
    cpu_millis: Option<u64>,
}

/// A remote process of a placement.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct RemoteProcess {
    /// The place that it fills: the function and the number of the replica, `group-0-1`. Revisions append theirs,
    /// `group-0-1-r2`.
    pub name: String,
    /// The function that it is a replica of: `group-0`, or `layer-3` by the model's layer id.
    pub function: String,
    /// Experts that it hosts.
    pub hosted: Vec<LayerExperts>,
    /// Memory in bytes, if the plan gives it.
    pub memory_bytes: Option<u64>,
    /// CPU in thousandths of a vCPU, if the plan gives it; otherwise what comes with the memory.
    pub cpu_millis: Option<u64>,
}

impl RemoteProcess {
    /// Replica `replica` of `function`, without planned sizes.
    fn new(function: String, replica: u32, hosted: Vec<LayerExperts>) -> Self {
        let name = format!("{function}-{replica}");
        Self { name, function, hosted, memory_bytes: None, cpu_millis: None }
    }
}

/// A placement that the model cannot have.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[error("{field}: {message}")]
pub struct PlacementError {
    /// The field of the plan that is wrong, as `layers[0].remote[2]`; empty: the file as a whole.
    pub field: String,
    /// Fault of the field.
    pub message: String,
}

impl PlacementError {
    fn new(field: impl Into<String>, message: impl Into<String>) -> Self {
        Self { field: field.into(), message: message.into() }
    }
}

/// Replicas of a layer or a group, at most: each is a process.
const MAX_REPLICAS: u32 = 64;
/// Groups that experts are dealt to, at most.
const MAX_GROUPS: u32 = 64;

impl Placement {
    /// The last `floor(ratio x experts + 0.5)` expert ids of each layer, in `replicas` processes.
    ///
    /// # Errors
    /// A ratio outside 0 to 1, or a number of replicas that cannot be.
    pub fn from_ratio(model: &[MoeLayer], ratio: f64, replicas: u32) -> Result<Self, PlacementError> {
        Self::of_share(model, ratio, replicas, |_, moe, count| (moe.experts - count..moe.experts).collect())
    }

    /// As many expert ids of each layer as [`Self::from_ratio`] takes, those that `usage` ([layers][experts]
    /// by position) says are used least; of two that are used alike, the later one.
    ///
    /// # Errors
    /// A ratio outside 0 to 1, a number of replicas that cannot be, or usage of another model.
    pub fn least_used(
        model: &[MoeLayer],
        usage: &[Vec<f64>],
        ratio: f64,
        replicas: u32,
    ) -> Result<Self, PlacementError> {
        let fits = |(moe, row): (&MoeLayer, &Vec<f64>)| row.len() == moe.experts as usize;
        if usage.len() != model.len() || !model.iter().zip(usage).all(fits) {
            let message = "expected expert usage of this model, got that of another one";
            return Err(PlacementError::new("remote_set", message));
        }
        Self::of_share(model, ratio, replicas, |layer, _, count| least_used(&usage[layer], count as usize))
    }

    /// In each layer `floor(ratio x experts + 0.5)` experts, which `choose` names ascending from the layer's
    /// position, the layer and their number.
    fn of_share(
        model: &[MoeLayer],
        ratio: f64,
        replicas: u32,
        choose: impl Fn(usize, &MoeLayer, u32) -> Vec<u32>,
    ) -> Result<Self, PlacementError> {
        if !(0.0..=1.0).contains(&ratio) {
            return Err(PlacementError::new("remote_ratio", format!("expected 0 to 1, got {ratio}")));
        }
        check_replicas("replicas", replicas)?;
        let sets = model.iter().enumerate().map(|(position, moe)| {
            // At most `experts`, so that the conversion is exact.
            let count = (ratio * f64::from(moe.experts) + 0.5).floor() as u32;
            RemoteSet {
                experts: LayerExperts {
                    layer: moe.layer,
                    experts: choose(position, moe, count.min(moe.experts)),
                },
                replicas,
                memory_bytes: None,
            }
        });
        Ok(Self::of(sets.collect(), Vec::new()))
    }

    /// Returns a placement of the same experts, those of each layer dealt to `groups` groups in turn, ids ascending.
    /// Each group has as many replicas as the layers had.
    ///
    /// # Errors
    /// The number of groups is out of range.
    pub fn in_groups(self, groups: u32) -> Result<Self, PlacementError> {
        check_count("groups", groups, MAX_GROUPS)?;
        let replicas = self.layers.iter().map(|set| set.replicas).max().unwrap_or(0);
        let mut dealt = vec![RemoteGroup { replicas, ..RemoteGroup::default() }; groups as usize];
        for LayerExperts { layer, experts } in self.remote() {
            for (turn, group) in dealt.iter_mut().enumerate() {
                let experts: Vec<u32> = experts.iter().skip(turn).step_by(groups as usize).copied().collect();
                if !experts.is_empty() {
                    group.hosted.push(LayerExperts { layer, experts });
                }
            }
        }
        dealt.retain(|group| !group.hosted.is_empty());
        Ok(Self { layers: Vec::new(), groups: dealt, revision: self.revision })
    }

    /// Reads a plan: `{"layers": [{"layer": 1, "remote": [6, 7], "replicas": 2}]}` with the model's
    /// layer ids (other layers stay local), or the planner's output, where `layers` lists all MoE
    /// layers by position.
    ///
    /// Beside `layers` or instead of them it may have groups, `{"groups": [{"experts": "1:0-3,2:7",
    /// "replicas": 2, "memory_bytes": 500000000, "vcpus": 2}]}`, which name layers as `layers` does: by
    /// position where those are listed by position, else by the model's ids. An entry of `layers` whose
    /// experts are all in groups, and which has no replicas, only says what is remote.
    ///
    /// # Errors
    /// The first field that does not fit the model, an expert in two groups, or one in a group and with
    /// replicas of its layer.
    pub fn from_plan(model: &[MoeLayer], json: &str) -> Result<Self, PlacementError> {
        plan_file::read(model, json)
    }

    fn of(mut layers: Vec<RemoteSet>, groups: Vec<RemoteGroup>) -> Self {
        layers.retain(|set| !set.experts.experts.is_empty());
        Self { layers, groups, revision: 0 }
    }

    /// Returns the placement as revision `revision`, whose processes have names of their own: they can run beside those
    /// of the revision before.
    #[must_use]
    pub fn revised(self, revision: u32) -> Self {
        Self { revision, ..self }
    }

    /// Returns the number of the revision; 0 is the first.
    pub fn revision(&self) -> u32 {
        self.revision
    }

    /// The remote experts of each layer that has any, layers and experts ascending.
    pub fn remote(&self) -> Vec<LayerExperts> {
        let mut remote: BTreeMap<u32, BTreeSet<u32>> = BTreeMap::new();
        let in_groups = self.groups.iter().flat_map(|group| &group.hosted);
        for set in self.layers.iter().map(|set| &set.experts).chain(in_groups) {
            remote.entry(set.layer).or_default().extend(&set.experts);
        }
        let sets = remote.into_iter();
        sets.map(|(layer, experts)| LayerExperts { layer, experts: experts.into_iter().collect() }).collect()
    }

    /// Returns the remote processes. A replica whose memory is planned is a process of its own, and so is each replica
    /// of a group; of the others, process j hosts the remote sets of all layers that have more than j replicas. These
    /// are the replicas of one more group, whose number follows those of the plan.
    pub fn processes(&self) -> Vec<RemoteProcess> {
        let (sized, together): (Vec<&RemoteSet>, Vec<&RemoteSet>) =
            self.layers.iter().partition(|set| set.memory_bytes.is_some());
        let count = together.iter().map(|set| set.replicas).max().unwrap_or(0);
        let shared = (0..count).map(|replica| {
            let sets = together.iter().filter(|set| set.replicas > replica);
            let hosted = sets.map(|set| set.experts.clone()).collect();
            RemoteProcess::new(format!("group-{}", self.groups.len()), replica, hosted)
        });
        let own = sized.into_iter().flat_map(|set| {
            (0..set.replicas).map(move |replica| RemoteProcess {
                memory_bytes: set.memory_bytes,
                ..RemoteProcess::new(
                    format!("layer-{}", set.experts.layer),
                    replica,
                    vec![set.experts.clone()],
                )
            })
        });
        let groups = self.groups.iter().enumerate().flat_map(|(index, group)| {
            (0..group.replicas).map(move |replica| RemoteProcess {
                memory_bytes: group.memory_bytes,
                cpu_millis: group.cpu_millis,
                ..RemoteProcess::new(format!("group-{index}"), replica, group.hosted.clone())
            })
        });
        let mut processes: Vec<RemoteProcess> = shared.chain(own).chain(groups).collect();
        if self.revision > 0 {
            for process in &mut processes {
                process.name.push_str(&format!("-r{}", self.revision));
            }
        }
        processes
    }
}

/// The `count` experts of a layer that `usage` says are used least, ascending; of two that are used alike, the
/// later one.
pub fn least_used(usage: &[f64], count: usize) -> Vec<u32> {
    let mut ids: Vec<usize> = (0..usage.len()).rev().collect();
    // Stable: the later ids come first among equals.
    ids.sort_by(|a, b| usage[*a].total_cmp(&usage[*b]));
    ids.truncate(count);
    ids.sort_unstable();
    ids.into_iter().map(|id| id as u32).collect()
}

/// The experts of `model` that are not in `remote`, layer by layer.
pub fn local_experts(model: &[MoeLayer], remote: &[LayerExperts]) -> Vec<LayerExperts> {
    let layers = model.iter().map(|moe| {
        let away = remote.iter().find(|set| set.layer == moe.layer);
        let is_local = |id: &u32| away.is_none_or(|set| set.experts.binary_search(id).is_err());
        LayerExperts { layer: moe.layer, experts: (0..moe.experts).filter(is_local).collect() }
    });
    layers.filter(|set| !set.experts.is_empty()).collect()
}

fn check_replicas(field: &str, replicas: u32) -> Result<(), PlacementError> {
    check_count(field, replicas, MAX_REPLICAS)
}

fn check_count(field: &str, count: u32, most: u32) -> Result<(), PlacementError> {
    if (1..=most).contains(&count) {
        Ok(())
    } else {
        Err(PlacementError::new(field, format!("expected 1 to {most}, got {count}")))
    }
}
