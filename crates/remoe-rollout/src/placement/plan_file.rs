//! Parses plan files into placements; errors name the invalid field.

use super::{MoeLayer, Placement, PlacementError, RemoteGroup, RemoteSet, check_replicas};
use remoe_proto::parse_listing;
use remoe_proto::v1::LayerExperts;
use serde::de::Error;
use serde::{Deserialize, Deserializer};
use serde_json::Value;
use std::collections::BTreeMap;

/// Plan file: layers by index, or all MoE layers by position.
#[derive(Deserialize)]
struct PlanFile {
    #[serde(default)]
    layers: Vec<PlanLayer>,
    #[serde(default)]
    groups: Vec<PlanGroup>,
}

#[derive(Deserialize)]
struct PlanLayer {
    layer: Option<u32>,
    remote: Vec<u32>,
    replicas: Option<u32>,
    #[serde(default, deserialize_with = "whole_bytes")]
    memory_bytes: Option<u64>,
}

#[derive(Deserialize)]
struct PlanGroup {
    /// Listing of experts: `1:0-3,2:7`.
    experts: String,
    replicas: Option<u32>,
    #[serde(default, deserialize_with = "whole_bytes")]
    memory_bytes: Option<u64>,
    vcpus: Option<f64>,
}

/// Deserialises bytes from any JSON number, rounded up, such as `1.5e9`.
fn whole_bytes<'de, D: Deserializer<'de>>(deserializer: D) -> Result<Option<u64>, D::Error> {
    match Option::<f64>::deserialize(deserializer)? {
        None => Ok(None),
        // In range, so the conversion is exact.
        Some(bytes) if (0.0..=1e15).contains(&bytes) => Ok(Some(bytes.ceil() as u64)),
        Some(bytes) => {
            Err(D::Error::custom(format!("is {bytes}, expected a number of bytes from 0 to 1e15")))
        }
    }
}

/// Index of the group that hosts each expert, by layer and expert.
type Grouped = BTreeMap<(u32, u32), usize>;

/// Parses the plan `json` into a placement for `model`.
pub(super) fn read(model: &[MoeLayer], json: &str) -> Result<Placement, PlacementError> {
    let not_json = |error: serde_json::Error| PlacementError::new("", format!("invalid plan: {error}"));
    let mut value: Value = serde_json::from_str(json).map_err(not_json)?;
    // The planner's complete output contains the plan.
    let plan = value.get_mut("plan").map(Value::take).unwrap_or(value);
    if !plan.is_object() {
        return Err(PlacementError::new("", "invalid plan: expected a JSON object"));
    }
    let plan: PlanFile = serde_path_to_error::deserialize(plan).map_err(|error| {
        let at = error.path().to_string();
        // The path `.` is the plan itself.
        PlacementError::new(if at == "." { String::new() } else { at }, error.into_inner().to_string())
    })?;
    let by_position = by_position(model, &plan)?;
    let mut grouped = Grouped::new();
    let mut groups = Vec::with_capacity(plan.groups.len());
    for (index, entry) in plan.groups.iter().enumerate() {
        groups.push(group(model, by_position, index, entry, &mut grouped)?);
    }
    let mut sets: BTreeMap<u32, Option<RemoteSet>> = BTreeMap::new();
    for (index, entry) in plan.layers.iter().enumerate() {
        let field = format!("layers[{index}]");
        let moe = match entry.layer {
            None => model.get(index),
            Some(id) => model.iter().find(|moe| moe.layer == id),
        };
        let moe = *moe.ok_or_else(|| {
            PlacementError::new(format!("{field}.layer"), unknown_layer(model, entry.layer))
        })?;
        if sets.insert(moe.layer, remote_set(&field, moe, entry, &grouped)?).is_some() {
            let message = format!("layer {} is listed twice", moe.layer);
            return Err(PlacementError::new(format!("{field}.layer"), message));
        }
    }
    Ok(Placement::of(sets.into_values().flatten().collect(), groups))
}

/// Returns whether layers are named by their position among the model's MoE layers.
fn by_position(model: &[MoeLayer], plan: &PlanFile) -> Result<bool, PlacementError> {
    let listed = plan.layers.len();
    let by_id = plan.layers.iter().filter(|entry| entry.layer.is_some()).count();
    if by_id != 0 && by_id != listed {
        let message = "expected \"layer\" in every entry or in none";
        return Err(PlacementError::new("layers", message));
    }
    if listed == 0 && !plan.groups.is_empty() {
        return Ok(false);
    }
    if by_id == 0 && listed != model.len() {
        let message = format!(
            "expected one entry per MoE layer of the model ({}), got {listed}; or name layers with \"layer\"",
            model.len()
        );
        return Err(PlacementError::new("layers", message));
    }
    Ok(by_id == 0)
}

/// Parses a group, and adds its experts to `grouped`.
fn group(
    model: &[MoeLayer],
    by_position: bool,
    index: usize,
    entry: &PlanGroup,
    grouped: &mut Grouped,
) -> Result<RemoteGroup, PlacementError> {
    let invalid =
        |name: &str, message: String| PlacementError::new(format!("groups[{index}].{name}"), message);
    let listed = parse_listing(&entry.experts).map_err(|error| invalid("experts", error.to_string()))?;
    if listed.is_empty() {
        return Err(invalid("experts", "is empty, expected at least one expert".to_owned()));
    }
    let mut hosted = Vec::with_capacity(listed.len());
    for set in listed {
        let moe = match by_position {
            true => model.get(set.layer as usize),
            false => model.iter().find(|moe| moe.layer == set.layer),
        };
        let Some(moe) = moe else {
            let message = match by_position {
                true => format!(
                    "expected a position below {}, the number of MoE layers of the model, got {}",
                    model.len(),
                    set.layer
                ),
                false => unknown_layer(model, Some(set.layer)),
            };
            return Err(invalid("experts", message));
        };
        for &expert in &set.experts {
            if expert >= moe.experts {
                return Err(invalid("experts", unknown_expert(expert, *moe)));
            }
            if let Some(other) = grouped.insert((moe.layer, expert), index) {
                let message = format!("expert {expert} of layer {} is already in groups[{other}]", moe.layer);
                return Err(invalid("experts", message));
            }
        }
        hosted.push(LayerExperts { layer: moe.layer, experts: set.experts });
    }
    let replicas = entry.replicas.unwrap_or(1);
    check_replicas(&format!("groups[{index}].replicas"), replicas)?;
    if entry.memory_bytes == Some(0) {
        return Err(invalid("memory_bytes", EMPTY_FUNCTION.to_owned()));
    }
    let cpu_millis = match entry.vcpus {
        None => None,
        Some(vcpus) if !(1e-3..=1e6).contains(&vcpus) => {
            return Err(invalid("vcpus", format!("is {vcpus}, expected 0.001 to 1e6")));
        }
        Some(_) if entry.memory_bytes.is_none() => {
            let message = "requires memory_bytes: limit a function in both or in neither";
            return Err(invalid("vcpus", message.to_owned()));
        }
        // In range, so the conversion is exact up to rounding.
        Some(vcpus) => Some((vcpus * 1000.0).round() as u64),
    };
    Ok(RemoteGroup { hosted, replicas, memory_bytes: entry.memory_bytes, cpu_millis })
}

const EMPTY_FUNCTION: &str = "is 0, expected the memory of a function in bytes";

/// Returns the experts that an entry of `layers` makes remote in addition to the groups; `None` if groups host all of
/// them.
fn remote_set(
    field: &str,
    moe: MoeLayer,
    entry: &PlanLayer,
    grouped: &Grouped,
) -> Result<Option<RemoteSet>, PlacementError> {
    let mut experts = entry.remote.clone();
    experts.sort_unstable();
    for (index, id) in entry.remote.iter().enumerate() {
        let message = if *id >= moe.experts {
            unknown_expert(*id, moe)
        } else if entry.remote[..index].contains(id) {
            format!("expert {id} is listed twice")
        } else {
            continue;
        };
        return Err(PlacementError::new(format!("{field}.remote[{index}]"), message));
    }
    let group_of = |id: &u32| grouped.get(&(moe.layer, *id));
    if let Some((id, group)) = entry.remote.iter().find_map(|id| Some((id, group_of(id)?))) {
        if let Some(replicas @ 1..) = entry.replicas {
            let message = format!(
                "is {replicas}, but groups[{group}] hosts expert {id}: its group sets the replicas; omit \
                 this field"
            );
            return Err(PlacementError::new(format!("{field}.replicas"), message));
        }
        return match entry.remote.iter().position(|id| group_of(id).is_none()) {
            None => Ok(None),
            Some(index) => {
                let message = format!(
                    "expert {} is in no group, but expert {id} of this layer is in groups[{group}]; list \
                     both in groups",
                    entry.remote[index]
                );
                Err(PlacementError::new(format!("{field}.remote[{index}]"), message))
            }
        };
    }
    // The planner gives empty sets no replicas.
    let replicas = entry.replicas.unwrap_or(1);
    if !experts.is_empty() {
        check_replicas(&format!("{field}.replicas"), replicas)?;
        if entry.memory_bytes == Some(0) {
            return Err(PlacementError::new(format!("{field}.memory_bytes"), EMPTY_FUNCTION));
        }
    }
    let experts = LayerExperts { layer: moe.layer, experts };
    Ok(Some(RemoteSet { experts, replicas, memory_bytes: entry.memory_bytes }))
}

fn unknown_expert(id: u32, moe: MoeLayer) -> String {
    format!("expected an expert from 0 to {} of layer {}, got {id}", moe.experts - 1, moe.layer)
}

fn unknown_layer(model: &[MoeLayer], layer: Option<u32>) -> String {
    let known: Vec<String> = model.iter().map(|moe| moe.layer.to_string()).collect();
    format!(
        "expected an MoE layer of the model ({}), got {}",
        known.join(", "),
        layer.map_or_else(|| "none".to_owned(), |id| id.to_string())
    )
}
