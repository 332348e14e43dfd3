//! Steps in which the local experts change, so that old and new experts together fit into memory.

/// Change of one layer.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct LayerChange {
    /// The layer's index in the model.
    pub(crate) layer: usize,
    /// Bytes of experts that become local.
    pub(crate) enters: u64,
    /// Bytes of experts that stop being local.
    pub(crate) leaves: u64,
}

/// A layer whose change does not fit in any order.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Shortage {
    pub(crate) layer: usize,
    /// Bytes that the layer needs in addition.
    pub(crate) needed: u64,
    /// Bytes that are available at its step.
    pub(crate) available: u64,
}

/// Returns the layers of each step. Within a step, new and old experts are in memory at the same time.
///
/// If a change does not fit as a whole, layers change one after the other. Layers that release memory go first, those that
/// need the least in front; then the others, those that release the most in front. If any order fits, this one does.
///
/// # Errors
/// Fails if no order fits into `available` bytes.
pub(crate) fn transition_steps(
    changes: &[LayerChange],
    mut available: u64,
) -> Result<Vec<Vec<usize>>, Shortage> {
    let mut order = changes.to_vec();
    order.sort_by_key(|change| match change.leaves >= change.enters {
        true => (0, change.enters),
        false => (1, u64::MAX - change.leaves),
    });
    let mut steps = vec![Vec::new()];
    let (mut entering, mut leaving) = (0_u64, 0_u64);
    for change in order {
        if entering.saturating_add(change.enters) > available {
            // The step ends: its old experts are released.
            available = (available - entering).saturating_add(leaving);
            (entering, leaving) = (0, 0);
            steps.push(Vec::new());
            if change.enters > available {
                return Err(Shortage { layer: change.layer, needed: change.enters, available });
            }
        }
        entering += change.enters;
        leaving = leaving.saturating_add(change.leaves);
        if let Some(step) = steps.last_mut() {
            step.push(change.layer);
        }
    }
    steps.retain(|step| !step.is_empty());
    Ok(steps)
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    fn changes() -> impl Strategy<Value = Vec<LayerChange>> {
        let sizes = prop::collection::vec((0_u64..20, 0_u64..20), 0..6);
        sizes.prop_map(|sizes| {
            let change = |(layer, (enters, leaves))| LayerChange { layer, enters, leaves };
            sizes.into_iter().enumerate().map(change).collect()
        })
    }

    /// Reports if some order of single layers fits.
    fn fits(changes: &[LayerChange], available: u64) -> bool {
        changes.is_empty()
            || (0..changes.len()).any(|first| {
                let mut rest = changes.to_vec();
                let change = rest.remove(first);
                change.enters <= available && fits(&rest, available - change.enters + change.leaves)
            })
    }

    #[test]
    fn change_that_fits_as_a_whole_is_one_step() {
        let change = |layer, enters, leaves| LayerChange { layer, enters, leaves };
        assert_eq!(transition_steps(&[], 0), Ok(vec![]));
        let both = [change(3, 4, 0), change(5, 6, 9)];
        assert_eq!(transition_steps(&both, 10), Ok(vec![vec![5, 3]]));
        assert_eq!(transition_steps(&both, 9), Ok(vec![vec![5], vec![3]]));
        assert_eq!(transition_steps(&both, 5), Err(Shortage { layer: 5, needed: 6, available: 5 }));
    }

    proptest! {
        #[test]
        fn steps_fit_into_memory_if_any_order_does(changes in changes(), bytes in 0_u64..60) {
                    let found = transition_steps(&changes, bytes);
                    prop_assert_eq!(found.is_ok(), fits(&changes, bytes), "{:?}", found);
            let Ok(found) = found else { return Ok(()) };
            let mut seen: Vec<usize> = found.concat();
            seen.sort_unstable();
            prop_assert_eq!(seen, (0..changes.len()).collect::<Vec<_>>());
            let mut available = bytes;
            for step in found {
                let enters: u64 = step.iter().map(|&layer| changes[layer].enters).sum();
                prop_assert!(enters <= available, "a step of {enters} bytes into {available}");
                available = available - enters + step.iter().map(|&layer| changes[layer].leaves).sum::<u64>();
            }
        }
    }
}
