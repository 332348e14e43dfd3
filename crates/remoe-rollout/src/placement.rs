//! Placement: which experts are remote, and which remote process hosts them. Pure.

mod plan_file;

use remoe_proto::v1::LayerExperts;
use std::collections::{BTreeMap, BTreeSet};

/// A Mixture-of-Experts layer of the model.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct MoeLayer {
    /// Layer index in the model.
    pub layer: u32,
    /// Number of routed experts of the layer.
    pub experts: u32,
}

/// Remote experts of every layer that has any, and their replicas.
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

/// Remote process of a placement.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct RemoteProcess {
    /// Slot name: the function and the index of the replica, `group-0-1`. Later revisions append their number,
    /// `group-0-1-r2`.
    pub name: String,
    /// Function name: `group-0`, or `layer-3` by the layer's index.
    pub function: String,
    /// Hosted experts.
    pub hosted: Vec<LayerExperts>,
    /// Memory in bytes, if the plan gives it.
    pub memory_bytes: Option<u64>,
    /// CPU in thousandths of a vCPU, if the plan gives it; otherwise it follows from the memory.
    pub cpu_millis: Option<u64>,
}

impl RemoteProcess {
    /// Creates replica `replica` of `function`, without planned sizes.
    fn new(function: String, replica: u32, hosted: Vec<LayerExperts>) -> Self {
        let name = format!("{function}-{replica}");
        Self { name, function, hosted, memory_bytes: None, cpu_millis: None }
    }
}

/// Invalid placement for a model.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[error("{field}: {message}")]
pub struct PlacementError {
    /// Invalid field of the plan, such as `layers[0].remote[2]`; empty for the whole file.
    pub field: String,
    /// Fault of the field.
    pub message: String,
}

impl PlacementError {
    fn new(field: impl Into<String>, message: impl Into<String>) -> Self {
        Self { field: field.into(), message: message.into() }
    }
}

/// Maximum replicas of a layer or group; each is a process.
const MAX_REPLICAS: u32 = 64;
/// Maximum number of groups.
const MAX_GROUPS: u32 = 64;

impl Placement {
    /// Makes the last `floor(ratio x experts + 0.5)` experts of each layer remote, in `replicas` processes.
    ///
    /// # Errors
    /// The ratio or the number of replicas is out of range.
    pub fn from_ratio(model: &[MoeLayer], ratio: f64, replicas: u32) -> Result<Self, PlacementError> {
        Self::with_ratio(model, ratio, replicas, |_, moe, count| (moe.experts - count..moe.experts).collect())
    }

    /// Makes the least used experts of each layer remote, as many as [`Self::from_ratio`]. `usage` is
    /// [layers][experts] by position; of equally used experts, the later one is taken.
    ///
    /// # Errors
    /// The ratio or the number of replicas is out of range, or the usage is of another model.
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
        Self::with_ratio(model, ratio, replicas, |layer, _, count| least_used(&usage[layer], count as usize))
    }

    /// Makes `floor(ratio x experts + 0.5)` experts of each layer remote. `choose` returns them in ascending order,
    /// given the layer's position, the layer, and their number.
    fn with_ratio(
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
            // At most `experts`, so the conversion is exact.
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

    /// Returns a placement of the same experts in `groups` groups; the experts of each layer are distributed
    /// round-robin. Each group has as many replicas as the layers had.
    ///
    /// # Errors
    /// The number of groups is out of range.
    pub fn in_groups(self, groups: u32) -> Result<Self, PlacementError> {
        check_count("groups", groups, MAX_GROUPS)?;
        let replicas = self.layers.iter().map(|set| set.replicas).max().unwrap_or(0);
        let mut distributed = vec![RemoteGroup { replicas, ..RemoteGroup::default() }; groups as usize];
        for LayerExperts { layer, experts } in self.remote() {
            for (index, group) in distributed.iter_mut().enumerate() {
                let experts: Vec<u32> =
                    experts.iter().skip(index).step_by(groups as usize).copied().collect();
                if !experts.is_empty() {
                    group.hosted.push(LayerExperts { layer, experts });
                }
            }
        }
        distributed.retain(|group| !group.hosted.is_empty());
        Ok(Self { layers: Vec::new(), groups: distributed, revision: self.revision })
    }

    /// Reads a plan. `{"layers": [{"layer": 1, "remote": [6, 7], "replicas": 2}]}` names layers by their index; other
    /// layers stay local. In the planner's output, `layers` lists all MoE layers by position.
    ///
    /// A plan may also have groups, `{"groups": [{"experts": "1:0-3,2:7", "replicas": 2, "memory_bytes": 500000000,
    /// "vcpus": 2}]}`. They name layers by position if `layers` does, else by index. An entry of `layers` without
    /// replicas, whose experts are all in groups, only lists what is remote.
    ///
    /// # Errors
    /// Names the first field that does not fit the model, or an expert that two groups, or a group and a layer with
    /// replicas, host.
    pub fn from_plan(model: &[MoeLayer], json: &str) -> Result<Self, PlacementError> {
        plan_file::read(model, json)
    }

    fn of(mut layers: Vec<RemoteSet>, groups: Vec<RemoteGroup>) -> Self {
        layers.retain(|set| !set.experts.experts.is_empty());
        Self { layers, groups, revision: 0 }
    }

    /// Returns the placement as revision `revision`. Its processes get their own names, so that they can run beside
    /// those of the revision before.
    #[must_use]
    pub fn revised(self, revision: u32) -> Self {
        Self { revision, ..self }
    }

    /// Returns the number of the revision; 0 is the first.
    pub fn revision(&self) -> u32 {
        self.revision
    }

    /// Returns the remote experts of each layer that has any, in ascending order.
    pub fn remote(&self) -> Vec<LayerExperts> {
        let mut remote: BTreeMap<u32, BTreeSet<u32>> = BTreeMap::new();
        let in_groups = self.groups.iter().flat_map(|group| &group.hosted);
        for set in self.layers.iter().map(|set| &set.experts).chain(in_groups) {
            remote.entry(set.layer).or_default().extend(&set.experts);
        }
        let sets = remote.into_iter();
        sets.map(|(layer, experts)| LayerExperts { layer, experts: experts.into_iter().collect() }).collect()
    }

    /// Returns the remote processes. Each replica with planned memory, and each replica of a group, is its own
    /// process. For all other layers, process j hosts the remote experts of all layers with more than j replicas;
    /// these processes form one more group, numbered after those of the plan.
    pub fn processes(&self) -> Vec<RemoteProcess> {
        let (sized, unsized_sets): (Vec<&RemoteSet>, Vec<&RemoteSet>) =
            self.layers.iter().partition(|set| set.memory_bytes.is_some());
        let count = unsized_sets.iter().map(|set| set.replicas).max().unwrap_or(0);
        let shared = (0..count).map(|replica| {
            let sets = unsized_sets.iter().filter(|set| set.replicas > replica);
            let hosted = sets.map(|set| set.experts.clone()).collect();
            RemoteProcess::new(format!("group-{}", self.groups.len()), replica, hosted)
        });
        let sized_processes = sized.into_iter().flat_map(|set| {
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
        let mut processes: Vec<RemoteProcess> = shared.chain(sized_processes).chain(groups).collect();
        if self.revision > 0 {
            for process in &mut processes {
                process.name.push_str(&format!("-r{}", self.revision));
            }
        }
        processes
    }
}

/// Returns the `count` least used experts of a layer, in ascending order; of equally used ones, the later one is
/// taken.
pub fn least_used(usage: &[f64], count: usize) -> Vec<u32> {
    let mut ids: Vec<usize> = (0..usage.len()).rev().collect();
    // The sort is stable: later ids come first among equals.
    ids.sort_by(|a, b| usage[*a].total_cmp(&usage[*b]));
    ids.truncate(count);
    ids.sort_unstable();
    ids.into_iter().map(|id| id as u32).collect()
}

/// Returns the experts of `model` that are not in `remote`, layer by layer.
pub fn local_experts(model: &[MoeLayer], remote: &[LayerExperts]) -> Vec<LayerExperts> {
    let layers = model.iter().map(|moe| {
        let remote_set = remote.iter().find(|set| set.layer == moe.layer);
        let is_local = |id: &u32| remote_set.is_none_or(|set| set.experts.binary_search(id).is_err());
        LayerExperts { layer: moe.layer, experts: (0..moe.experts).filter(is_local).collect() }
    });
    layers.filter(|set| !set.experts.is_empty()).collect()
}

fn check_replicas(field: &str, replicas: u32) -> Result<(), PlacementError> {
    check_count(field, replicas, MAX_REPLICAS)
}

fn check_count(field: &str, count: u32, max: u32) -> Result<(), PlacementError> {
    if (1..=max).contains(&count) {
        Ok(())
    } else {
        Err(PlacementError::new(field, format!("expected 1 to {max}, got {count}")))
    }
}
