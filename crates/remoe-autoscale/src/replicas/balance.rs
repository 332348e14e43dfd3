//! Distribution of replicas among remote functions: MoEless' expert scaling (Algorithm 1), with a floor.

/// Group of equal replicas that share their load.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct ReplicaGroup {
    /// Seconds of work per second; 1 keeps one replica busy all the time.
    pub load: f64,
    /// Smallest number of replicas.
    pub least: u32,
    /// Largest number of replicas.
    pub most: u32,
    /// Memory of a replica, in bytes.
    pub bytes: u64,
}

/// Coefficient of variation of replica loads up to which they count as balanced: that of MoEless' evaluation (section
/// 6.4).
const MAX_BALANCED_VARIATION: f64 = 0.2;
/// Share of the target below which a replica's load is too low to add replicas for balance.
const LOW_LOAD_SHARE: f64 = 0.5;

/// Returns the number of replicas of each of `groups`. As in MoEless, adds a replica to the group with the highest
/// load per replica, until the loads are balanced or `memory` bytes are used up. Unlike in MoEless, idle replicas
/// cost money here. So no replica is added for balance while all loads are below half of `target`, and one is always
/// added while a load exceeds `target`.
#[must_use]
pub fn balance_replicas(groups: &[ReplicaGroup], target: f64, memory: u64) -> Vec<u32> {
    let mut replicas: Vec<u32> = groups.iter().map(|group| group.least.max(1)).collect();
    let mut free_memory = memory;
    // Groups that cannot get another replica.
    let mut is_full = vec![false; groups.len()];
    loop {
        let loads: Vec<f64> =
            groups.iter().zip(&replicas).map(|(group, count)| group.load / f64::from(*count)).collect();
        let open = (0..groups.len()).filter(|index| !is_full[*index]);
        let Some(busiest) = open.max_by(|one, other| loads[*one].total_cmp(&loads[*other])) else {
            return replicas;
        };
        let is_needed = loads[busiest] > target;
        // A replica for a group below the mean would not improve the balance.
        let improves_balance = loads[busiest] > target * LOW_LOAD_SHARE
            && loads[busiest] > mean(&loads)
            && coefficient_of_variation(&loads) > MAX_BALANCED_VARIATION;
        if !is_needed && !improves_balance {
            return replicas;
        }
        let group = groups[busiest];
        if replicas[busiest] >= group.most || group.bytes > free_memory {
            is_full[busiest] = true;
            continue;
        }
        replicas[busiest] += 1;
        free_memory -= group.bytes;
    }
}

fn mean(values: &[f64]) -> f64 {
    values.iter().sum::<f64>() / values.len().max(1) as f64
}

/// Returns the coefficient of variation: the standard deviation divided by the mean.
fn coefficient_of_variation(values: &[f64]) -> f64 {
    let mean = mean(values);
    if mean <= 0.0 {
        return 0.0;
    }
    let variance = values.iter().map(|value| (value - mean).powi(2)).sum::<f64>() / values.len() as f64;
    variance.sqrt() / mean
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    fn groups(loads: &[f64]) -> Vec<ReplicaGroup> {
        loads.iter().map(|load| ReplicaGroup { load: *load, least: 1, most: 8, bytes: 10 }).collect()
    }

    #[test]
    fn busiest_group_gets_replicas_until_loads_are_balanced() {
        // 0.69, 0.3, 0.3, 0.3: the first load is above half of the target and far above the others.
        assert_eq!(balance_replicas(&groups(&[0.69, 0.3, 0.3, 0.3]), 0.7, 1_000), [2, 1, 1, 1]);
        // As uneven, but all loads are low.
        assert_eq!(balance_replicas(&groups(&[0.069, 0.03, 0.03, 0.03]), 0.7, 1_000), [1, 1, 1, 1]);
        // Balanced, and above the target.
        assert_eq!(balance_replicas(&groups(&[1.5, 1.5]), 0.75, 1_000), [2, 2]);
        assert_eq!(balance_replicas(&groups(&[5.0, 0.1]), 0.7, 1_000), [8, 1]);
    }

    #[test]
    fn memory_goes_to_the_highest_loads() {
        assert_eq!(balance_replicas(&groups(&[3.0, 2.0, 0.5]), 0.7, 0), [1, 1, 1]);
        assert_eq!(balance_replicas(&groups(&[3.0, 2.0, 0.5]), 0.7, 10), [2, 1, 1]);
        assert_eq!(balance_replicas(&groups(&[3.0, 2.0, 0.5]), 0.7, 29), [2, 2, 1]);
        assert_eq!(balance_replicas(&[], 0.7, 29), [0_u32; 0]);
    }

    proptest! {
        #[test]
        fn bounds_hold_and_needed_replicas_exist(
            loads in prop::collection::vec(0.0_f64..20.0, 1..20),
            least in 1_u32..4,
            more in 0_u32..8,
            memory in 0_u64..400,
            target in 0.1_f64..1.0,
        ) {
            let most = least + more;
            let groups: Vec<ReplicaGroup> =
                loads.iter().map(|load| ReplicaGroup { load: *load, least, most, bytes: 10 }).collect();
            let replicas = balance_replicas(&groups, target, memory);
            let added: u32 = replicas.iter().map(|count| count - least).sum();
            prop_assert!(u64::from(added) * 10 <= memory);
            prop_assert!(replicas.iter().all(|count| (least..=most).contains(count)));
            let is_full = memory - u64::from(added) * 10 < 10;
            for (group, count) in groups.iter().zip(&replicas) {
                prop_assert!(is_full || *count == most || group.load / f64::from(*count) <= target);
            }
            // More load never takes a replica away where there is memory for all.
            let more: Vec<ReplicaGroup> = groups.iter().map(|group| ReplicaGroup { load: group.load * 1.5, ..*group }).collect();
            if memory >= u64::from(more.len() as u32 * (most - least)) * 10 {
                let needed = |groups: &[ReplicaGroup]| groups.iter().map(|it| (it.load / target).ceil() as u32).collect::<Vec<_>>();
                for ((count, need), most) in balance_replicas(&more, target, memory).iter().zip(needed(&more)).zip(std::iter::repeat(most)) {
                    prop_assert!(*count >= need.min(most));
                }
            }
        }
    }
}
