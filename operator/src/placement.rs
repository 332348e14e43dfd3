//! Which experts are remote, and which remote process hosts which of them. Pure.

use remoe_wire::v1::LayerExperts;
use serde::Deserialize;

/// A Mixture-of-Experts layer of the model.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct MoeLayer {
    /// The model's own layer id.
    pub layer: u32,
    /// Its number of routed experts.
    pub experts: u32,
}

/// The remote experts of every layer that has any.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct Placement {
    layers: Vec<RemoteSet>,
}

/// The remote experts of one layer, hosted as a whole by each of its replicas.
#[derive(Debug, Clone, PartialEq, Eq)]
struct RemoteSet {
    experts: LayerExperts,
    replicas: u32,
    /// Of each replica, where the plan says.
    memory_bytes: Option<u64>,
}

/// A remote process of a placement.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct RemoteProcess {
    /// The place that it fills.
    pub name: String,
    /// What it hosts.
    pub hosted: Vec<LayerExperts>,
    /// Its memory, where the plan says.
    pub memory_bytes: Option<u64>,
}

/// A placement that the model cannot have.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[error("{field}: {message}")]
pub struct PlacementError {
    /// The field of the plan that is wrong, as `layers[0].remote[2]`; empty: the file as a whole.
    pub field: String,
    /// What is wrong with it.
    pub message: String,
}

impl PlacementError {
    fn new(field: impl Into<String>, message: impl Into<String>) -> Self {
        Self { field: field.into(), message: message.into() }
    }
}

/// Replicas of a layer, at most: each is a process.
const MAX_REPLICAS: u32 = 64;

/// A plan as a file: layers by the model's layer ids, or all MoE layers by position.
#[derive(Deserialize)]
struct PlanFile {
    layers: Vec<PlanLayer>,
}

#[derive(Deserialize)]
struct PlanLayer {
    layer: Option<u32>,
    remote: Vec<u32>,
    replicas: Option<u32>,
    memory_bytes: Option<u64>,
}

/// The planner's whole answer, which contains the plan.
#[derive(Deserialize)]
struct PlannerAnswer {
    plan: PlanFile,
}

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
            return Err(PlacementError::new("remote_set", "the usage of experts is that of another model"));
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
            return Err(PlacementError::new("remote_ratio", format!("{ratio} is not between 0 and 1")));
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
        Ok(Self::of(sets.collect()))
    }

    /// Reads a plan: `{"layers": [{"layer": 1, "remote": [6, 7], "replicas": 2}]}` with the model's
    /// layer ids (other layers stay local), or the planner's output, where `layers` lists all MoE
    /// layers by position.
    ///
    /// # Errors
    /// The first field that does not fit the model.
    pub fn from_plan(model: &[MoeLayer], json: &str) -> Result<Self, PlacementError> {
        let not_json = |error: serde_json::Error| PlacementError::new("", format!("is not a plan: {error}"));
        let value: serde_json::Value = serde_json::from_str(json).map_err(not_json)?;
        let plan = if value.get("plan").is_some() {
            serde_json::from_value(value).map(|answer: PlannerAnswer| answer.plan)
        } else {
            serde_json::from_value(value)
        }
        .map_err(not_json)?;

        let by_id = plan.layers.iter().filter(|entry| entry.layer.is_some()).count();
        if by_id != 0 && by_id != plan.layers.len() {
            return Err(PlacementError::new(
                "layers",
                "either every entry names its \"layer\", or none does",
            ));
        }
        if by_id == 0 && plan.layers.len() != model.len() {
            return Err(PlacementError::new(
                "layers",
                format!(
                    "lists {} layers by position, the model has {} MoE layers",
                    plan.layers.len(),
                    model.len()
                ),
            ));
        }
        let mut sets: Vec<RemoteSet> = Vec::new();
        for (index, entry) in plan.layers.iter().enumerate() {
            let field = format!("layers[{index}]");
            let moe = match entry.layer {
                None => model.get(index),
                Some(id) => model.iter().find(|moe| moe.layer == id),
            }
            .ok_or_else(|| PlacementError::new(format!("{field}.layer"), not_moe(model, entry.layer)))?;
            if sets.iter().any(|set| set.experts.layer == moe.layer) {
                let message = format!("layer {} is listed twice", moe.layer);
                return Err(PlacementError::new(format!("{field}.layer"), message));
            }
            sets.push(remote_set(&field, *moe, entry)?);
        }
        sets.sort_by_key(|set| set.experts.layer);
        Ok(Self::of(sets))
    }

    fn of(mut layers: Vec<RemoteSet>) -> Self {
        layers.retain(|set| !set.experts.experts.is_empty());
        Self { layers }
    }

    /// The remote experts of each layer that has any, layers and experts ascending.
    pub fn remote(&self) -> Vec<LayerExperts> {
        self.layers.iter().map(|set| set.experts.clone()).collect()
    }

    /// The remote processes. A replica whose memory is planned is one of its own; of the others,
    /// process j hosts the remote sets of all layers that have more than j replicas.
    pub fn processes(&self) -> Vec<RemoteProcess> {
        let (sized, together): (Vec<&RemoteSet>, Vec<&RemoteSet>) =
            self.layers.iter().partition(|set| set.memory_bytes.is_some());
        let count = together.iter().map(|set| set.replicas).max().unwrap_or(0);
        let shared = (0..count).map(|process| {
            let sets = together.iter().filter(|set| set.replicas > process);
            RemoteProcess {
                name: format!("remote-{process}"),
                hosted: sets.map(|set| set.experts.clone()).collect(),
                memory_bytes: None,
            }
        });
        let own = sized.into_iter().flat_map(|set| {
            (0..set.replicas).map(move |replica| RemoteProcess {
                name: format!("remote-{}-{replica}", set.experts.layer),
                hosted: vec![set.experts.clone()],
                memory_bytes: set.memory_bytes,
            })
        });
        shared.chain(own).collect()
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

fn remote_set(field: &str, moe: MoeLayer, entry: &PlanLayer) -> Result<RemoteSet, PlacementError> {
    let mut experts = entry.remote.clone();
    experts.sort_unstable();
    for (index, id) in entry.remote.iter().enumerate() {
        let message = if *id >= moe.experts {
            format!("expert {id} does not exist, layer {} has experts 0 to {}", moe.layer, moe.experts - 1)
        } else if entry.remote[..index].contains(id) {
            format!("expert {id} is listed twice")
        } else {
            continue;
        };
        return Err(PlacementError::new(format!("{field}.remote[{index}]"), message));
    }
    // The planner gives an empty set no replicas.
    let replicas = entry.replicas.unwrap_or(1);
    if !experts.is_empty() {
        check_replicas(&format!("{field}.replicas"), replicas)?;
    }
    if entry.memory_bytes.is_some_and(|bytes| bytes == 0 && !experts.is_empty()) {
        let message = "is 0, expected the bytes of a function with experts";
        return Err(PlacementError::new(format!("{field}.memory_bytes"), message));
    }
    Ok(RemoteSet {
        experts: LayerExperts { layer: moe.layer, experts },
        replicas,
        memory_bytes: entry.memory_bytes,
    })
}

fn check_replicas(field: &str, replicas: u32) -> Result<(), PlacementError> {
    if (1..=MAX_REPLICAS).contains(&replicas) {
        Ok(())
    } else {
        let message = format!("{replicas} is not between 1 and {MAX_REPLICAS}");
        Err(PlacementError::new(field, message))
    }
}

fn not_moe(model: &[MoeLayer], layer: Option<u32>) -> String {
    let known: Vec<String> = model.iter().map(|moe| moe.layer.to_string()).collect();
    format!(
        "{} is not an MoE layer of the model, which has {}",
        layer.map_or_else(|| "it".to_owned(), |id| id.to_string()),
        known.join(", ")
    )
}
