//! Reads the machine's memory (NUMA) nodes from sysfs.

use std::fs;
use std::path::Path;

const NODES: &str = "/sys/devices/system/node";

/// Spreads weights that are loaded from now on over the memory (NUMA) nodes that this process computes on. Returns the
/// number of nodes; with one node nothing changes. Call this once, before experts are loaded.
pub fn spread_over_nodes() -> usize {
    let nodes = remoe_kernels::spread_over_nodes(&cores_of_nodes(Path::new(NODES)));
    if nodes > 1 {
        tracing::info!(nodes, "weights spread over memory nodes");
    }
    nodes
}

/// Reads the cores of each node that has memory and cores. Returns no node if sysfs cannot be read.
fn cores_of_nodes(root: &Path) -> Vec<Vec<usize>> {
    let read = |file: &str| fs::read_to_string(root.join(file)).ok().and_then(|list| parse_list(&list));
    let with_memory = read("has_memory").unwrap_or_default();
    let cores = with_memory.iter().filter_map(|node| read(&format!("node{node}/cpulist")));
    cores.filter(|cores| !cores.is_empty()).collect()
}

/// Parses a list of numbers such as `0-3,8,10-11`.
fn parse_list(list: &str) -> Option<Vec<usize>> {
    /// Upper bound of cores and nodes: more than any machine has.
    const MAX_NUMBER: usize = 1 << 16;
    let mut numbers = Vec::new();
    for part in list.trim().split(',').filter(|part| !part.is_empty()) {
        let (first, last) = part.split_once('-').unwrap_or((part, part));
        let (first, last): (usize, usize) = (first.parse().ok()?, last.parse().ok()?);
        if last >= MAX_NUMBER {
            return None;
        }
        numbers.extend(first..=last);
    }
    Some(numbers)
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used)]

    use super::*;
    use remoe_kernels::{Dtype, PackedMatrixBuilder};

    #[test]
    fn lists_parse_as_linux_writes_them() {
        assert_eq!(parse_list("0-3,8,10-11\n"), Some(vec![0, 1, 2, 3, 8, 10, 11]));
        assert_eq!(parse_list("\n"), Some(Vec::new()));
        for wrong in ["x", "1-", "-1", "1,,x", "0-99999999999", "0-70000"] {
            assert_eq!(parse_list(wrong), None, "{wrong}");
        }
    }

    #[test]
    fn nodes_without_memory_or_cores_are_left_out() {
        let root = std::env::temp_dir().join(format!("remoe-nodes-{}", std::process::id()));
        let write = |file: &str, text: &str| {
            let file = root.join(file);
            fs::create_dir_all(file.parent().unwrap()).unwrap();
            fs::write(file, text).unwrap();
        };
        write("has_memory", "0,2-3\n");
        write("node0/cpulist", "0-1,4\n");
        write("node1/cpulist", "2\n");
        write("node2/cpulist", "\n");
        write("node3/cpulist", "3\n");
        assert_eq!(cores_of_nodes(&root), [vec![0, 1, 4], vec![3]]);
        fs::remove_dir_all(&root).unwrap();
        assert!(cores_of_nodes(&root).is_empty());
    }

    /// Bytes that each node has of this process' largest mapping.
    fn largest_mapping() -> Vec<usize> {
        let maps = fs::read_to_string("/proc/self/numa_maps").unwrap();
        let counts = maps.lines().map(|line| {
            let value = |name: &str| {
                line.split(' ').find_map(|word| word.strip_prefix(name)?.parse::<usize>().ok()).unwrap_or(0)
            };
            let page = value("kernelpagesize_kB=") << 10;
            (0..64).map(|node| value(&format!("N{node}=")) * page).collect::<Vec<_>>()
        });
        counts.max_by_key(|counts| counts.iter().sum::<usize>()).unwrap()
    }

    #[test]
    fn every_node_holds_its_part_of_a_matrix() {
        let status = fs::read_to_string("/proc/self/status").unwrap();
        let allowed =
            status.lines().find_map(|line| line.strip_prefix("Cpus_allowed_list:")).and_then(parse_list);
        let allowed = allowed.unwrap();
        let nodes = cores_of_nodes(Path::new(NODES));
        let mine = |cores: &Vec<usize>| cores.iter().filter(|core| allowed.contains(core)).count();
        let threads = std::thread::available_parallelism().unwrap().get();
        let bound = nodes.iter().any(|cores| mine(cores) >= threads);
        let nodes = nodes.iter().filter(|cores| mine(cores) > 0).count();
        if bound || nodes < 2 || !Path::new("/proc/self/numa_maps").exists() {
            eprintln!("one memory node: nothing to spread over");
            return;
        }
        assert_eq!(spread_over_nodes(), nodes);
        let matrix = PackedMatrixBuilder::new(1 << 14, 1 << 12, Dtype::Bf16).unwrap();
        let counts = largest_mapping();
        let all: usize = counts.iter().sum();
        assert!(all >= 1 << 27, "{counts:?}");
        assert_eq!(
            counts.iter().filter(|&&bytes| bytes * nodes * 10 >= all * 9).count(),
            nodes,
            "{counts:?}"
        );
        drop(matrix);
    }
}
