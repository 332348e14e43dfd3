//! Directed graphs of names.

use std::collections::{BTreeMap, BTreeSet};

/// Dependencies of each name.
pub(crate) type Graph = BTreeMap<String, BTreeSet<String>>;

/// Returns the circles of a graph: sets of names that all reach each other (strongly connected components of two or
/// more).
pub(crate) fn circles(graph: &Graph) -> Vec<BTreeSet<String>> {
    let reached: BTreeMap<&str, BTreeSet<&str>> =
        graph.keys().map(|name| (name.as_str(), reachable(graph, name))).collect();
    let mut found: Vec<BTreeSet<String>> = Vec::new();
    for name in graph.keys() {
        if found.iter().any(|circle| circle.contains(name)) {
            continue;
        }
        let circle: BTreeSet<String> = graph
            .keys()
            .filter(|other| {
                reached[name.as_str()].contains(other.as_str())
                    && reached[other.as_str()].contains(name.as_str())
            })
            .cloned()
            .collect();
        if circle.len() > 1 {
            found.push(circle);
        }
    }
    found
}

/// Returns the names that `from` reaches by one or more dependencies.
pub(crate) fn reachable<'a>(graph: &'a Graph, from: &str) -> BTreeSet<&'a str> {
    let mut reached = BTreeSet::new();
    let mut left: Vec<&str> = graph.get(from).into_iter().flatten().map(String::as_str).collect();
    while let Some(name) = left.pop() {
        if reached.insert(name) {
            left.extend(graph.get(name).into_iter().flatten().map(String::as_str));
        }
    }
    reached
}

/// Returns the transitive reduction: the dependencies that do not follow from others.
pub(crate) fn reduced(graph: &Graph) -> Graph {
    graph
        .iter()
        .map(|(name, below)| {
            let kept = below
                .iter()
                .filter(|one| !below.iter().any(|other| reachable(graph, other).contains(one.as_str())));
            (name.clone(), kept.cloned().collect())
        })
        .collect()
}

fn graph(lines: &[(&str, &[&str])]) -> Graph {
    lines
        .iter()
        .map(|(name, below)| ((*name).to_owned(), below.iter().map(|one| (*one).to_owned()).collect()))
        .collect()
}

#[test]
fn circles_two_knots_and_a_line_finds_the_knots() {
    let knots = graph(&[
        ("a", &["b"]),
        ("b", &["c"]),
        ("c", &["a", "d"]),
        ("d", &["e"]),
        ("e", &["d"]),
        ("f", &["a"]),
    ]);
    let named = |names: &[&str]| names.iter().map(|name| (*name).to_owned()).collect::<BTreeSet<_>>();
    assert_eq!(circles(&knots), [named(&["a", "b", "c"]), named(&["d", "e"])]);
}

#[test]
fn reduced_drops_what_another_dependency_implies() {
    let lines = graph(&[("a", &["b", "c"]), ("b", &["c"]), ("c", &[])]);
    assert_eq!(reduced(&lines), graph(&[("a", &["b"]), ("b", &["c"]), ("c", &[])]));
}
