//! In which steps the local experts change, so that old and new ones together fit into memory. Pure.

/// Change of one layer.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct LayerChange {
    /// The model's layer id.
    pub(crate) layer: usize,
    /// Bytes of experts that become local.
    pub(crate) enters: u64,
    /// Bytes of experts that are local no more.
    pub(crate) leaves: u64,
}

/// A layer whose change does not fit, whatever changed before it.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Shortage {
    pub(crate) layer: usize,
    /// Bytes that it needs beside what is there.
    pub(crate) needed: u64,
    /// Bytes that there is room for by then.
    pub(crate) room: u64,
}

/// The layers of each step. In a step what enters is there beside what leaves, so the steps of a change
/// that does not fit as a whole go layer by layer: those that release memory first, the least needy of
/// them at the front, then the others, those that release most at the front. If any order fits, this one
/// does.
///
/// # Errors
/// No order fits into `room` bytes.
pub(crate) fn steps(changes: &[LayerChange], mut room: u64) -> Result<Vec<Vec<usize>>, Shortage> {
    let mut order = changes.to_vec();
    order.sort_by_key(|change| match change.leaves >= change.enters {
        true => (0, change.enters),
        false => (1, u64::MAX - change.leaves),
    });
    let mut steps = vec![Vec::new()];
    let (mut entered, mut left) = (0_u64, 0_u64);
    for change in order {
        if entered.saturating_add(change.enters) > room {
            // A step ends: what left in it is free.
            room = (room - entered).saturating_add(left);
            (entered, left) = (0, 0);
            steps.push(Vec::new());
            if change.enters > room {
                return Err(Shortage { layer: change.layer, needed: change.enters, room });
            }
        }
        entered += change.enters;
        left = left.saturating_add(change.leaves);
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
    fn fits(changes: &[LayerChange], room: u64) -> bool {
        changes.is_empty()
            || (0..changes.len()).any(|first| {
                let mut rest = changes.to_vec();
                let change = rest.remove(first);
                change.enters <= room && fits(&rest, room - change.enters + change.leaves)
            })
    }

    #[test]
    fn what_fits_as_a_whole_is_one_step() {
        let change = |layer, enters, leaves| LayerChange { layer, enters, leaves };
        assert_eq!(steps(&[], 0), Ok(vec![]));
        let both = [change(3, 4, 0), change(5, 6, 9)];
        assert_eq!(steps(&both, 10), Ok(vec![vec![5, 3]]));
        assert_eq!(steps(&both, 9), Ok(vec![vec![5], vec![3]]));
        assert_eq!(steps(&both, 5), Err(Shortage { layer: 5, needed: 6, room: 5 }));
    }

    proptest! {
        #[test]
        fn steps_stay_within_the_room_wherever_that_is_possible(changes in changes(), room in 0_u64..60) {
            let found = steps(&changes, room);
            prop_assert_eq!(found.is_ok(), fits(&changes, room), "{:?}", found);
            let Ok(found) = found else { return Ok(()) };
            let mut seen: Vec<usize> = found.concat();
            seen.sort_unstable();
            prop_assert_eq!(seen, (0..changes.len()).collect::<Vec<_>>());
            let mut room = room;
            for step in found {
                let enters: u64 = step.iter().map(|&layer| changes[layer].enters).sum();
                prop_assert!(enters <= room, "a step of {enters} bytes into {room}");
                room = room - enters + step.iter().map(|&layer| changes[layer].leaves).sum::<u64>();
            }
        }
    }
}
