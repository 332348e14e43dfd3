//! Replicas among remote functions: MoEless' expert scaling (Algorithm 1), with a floor.

/// Functions that are alike and share their work.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct ReplicaBalance {
    /// Seconds of work a second: what one replica would do that is always busy.
    pub load: f64,
    /// Replicas at least.
    pub least: u32,
    /// Replicas at most.
    pub most: u32,
    /// Memory of a replica, in bytes.
    pub bytes: u64,
}

/// Coefficient of variation of the load of replicas up to which groups count as balanced: what MoEless' evaluation takes
/// (section 6.4).
const BALANCED: f64 = 0.2;
/// Below this share of the target a replica is so quiet that balance is worth no memory.
const QUIET: f64 = 0.5;

/// Replicas of each of `groups`. As in MoEless one is added where a replica has the most to do until the loads of replicas
/// vary by little or `memory`, in bytes, is used up. Unlike there, the loads are of functions that are paid for while they
/// exist: as long as replicas do at most half of `target` of what they can none is added for balance, and where one
/// would have to do more than `target` one is added however balanced they are.
#[must_use]
pub fn balance(groups: &[ReplicaBalance], target: f64, memory: u64) -> Vec<u32> {
    let mut replicas: Vec<u32> = groups.iter().map(|group| group.least.max(1)).collect();
    let mut left = memory;
    // Those that cannot have another.
    let mut full = vec![false; groups.len()];
    loop {
        let each: Vec<f64> =
            groups.iter().zip(&replicas).map(|(group, count)| group.load / f64::from(*count)).collect();
        let open = (0..groups.len()).filter(|index| !full[*index]);
        let Some(busiest) = open.max_by(|one, other| each[*one].total_cmp(&each[*other])) else {
            return replicas;
        };
        let is_needed = each[busiest] > target;
        // One that is not above the others makes nothing more even.
        let is_worth =
            each[busiest] > target * QUIET && each[busiest] > mean(&each) && variation(&each) > BALANCED;
        if !is_needed && !is_worth {
            return replicas;
        }
        let group = groups[busiest];
        if replicas[busiest] >= group.most || group.bytes > left {
            full[busiest] = true;
            continue;
        }
        replicas[busiest] += 1;
        left -= group.bytes;
    }
}

fn mean(values: &[f64]) -> f64 {
    values.iter().sum::<f64>() / values.len().max(1) as f64
}

/// The coefficient of variation: the standard deviation over the mean.
fn variation(values: &[f64]) -> f64 {
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

    fn groups(loads: &[f64]) -> Vec<ReplicaBalance> {
        loads.iter().map(|load| ReplicaBalance { load: *load, least: 1, most: 8, bytes: 10 }).collect()
    }

    #[test]
    fn the_busiest_gets_more_until_loads_are_alike() {
        // 0.7, 0.3, 0.3, 0.3: the first is above half of what is aimed at and stands out.
        assert_eq!(balance(&groups(&[0.69, 0.3, 0.3, 0.3]), 0.7, 1_000), [2, 1, 1, 1]);
        // As uneven, and so quiet that no request waits.
        assert_eq!(balance(&groups(&[0.069, 0.03, 0.03, 0.03]), 0.7, 1_000), [1, 1, 1, 1]);
        // Even, and above what one is to do.
        assert_eq!(balance(&groups(&[1.5, 1.5]), 0.75, 1_000), [2, 2]);
        assert_eq!(balance(&groups(&[5.0, 0.1]), 0.7, 1_000), [8, 1]);
    }

    #[test]
    fn memory_goes_where_most_is_to_be_done() {
        assert_eq!(balance(&groups(&[3.0, 2.0, 0.5]), 0.7, 0), [1, 1, 1]);
        assert_eq!(balance(&groups(&[3.0, 2.0, 0.5]), 0.7, 10), [2, 1, 1]);
        assert_eq!(balance(&groups(&[3.0, 2.0, 0.5]), 0.7, 29), [2, 2, 1]);
        assert_eq!(balance(&[], 0.7, 29), [0_u32; 0]);
    }

    proptest! {
        #[test]
        fn bounds_hold_and_what_is_needed_is_there(
            loads in prop::collection::vec(0.0_f64..20.0, 1..20),
            least in 1_u32..4,
            more in 0_u32..8,
            memory in 0_u64..400,
            target in 0.1_f64..1.0,
        ) {
            let most = least + more;
            let groups: Vec<ReplicaBalance> =
                loads.iter().map(|load| ReplicaBalance { load: *load, least, most, bytes: 10 }).collect();
            let replicas = balance(&groups, target, memory);
            let added: u32 = replicas.iter().map(|count| count - least).sum();
            prop_assert!(u64::from(added) * 10 <= memory);
            prop_assert!(replicas.iter().all(|count| (least..=most).contains(count)));
            let is_full = memory - u64::from(added) * 10 < 10;
            for (group, count) in groups.iter().zip(&replicas) {
                prop_assert!(is_full || *count == most || group.load / f64::from(*count) <= target);
            }
            // More load never takes a replica away where there is memory for all.
            let more: Vec<ReplicaBalance> = groups.iter().map(|group| ReplicaBalance { load: group.load * 1.5, ..*group }).collect();
            if memory >= u64::from(more.len() as u32 * (most - least)) * 10 {
                let needed = |groups: &[ReplicaBalance]| groups.iter().map(|it| (it.load / target).ceil() as u32).collect::<Vec<_>>();
                for ((count, need), most) in balance(&more, target, memory).iter().zip(needed(&more)).zip(std::iter::repeat(most)) {
                    prop_assert!(*count >= need.min(most));
                }
            }
        }
    }
}
