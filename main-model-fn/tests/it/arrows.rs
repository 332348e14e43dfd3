//! The modules of this crate use each other in one direction: whoever reads one needs only those below it.

use std::collections::{BTreeMap, BTreeSet};
use std::fs;
use std::path::{Path, PathBuf};

type Arrows = BTreeMap<String, BTreeSet<String>>;

fn sources(folder: &Path) -> Vec<PathBuf> {
    let entries = fs::read_dir(folder).unwrap().map(|entry| entry.unwrap().path());
    entries.flat_map(|path| if path.is_dir() { sources(&path) } else { vec![path] }).collect()
}

/// The top-level modules that `text` names, tests and comments aside. What the root re-exports belongs to the module that
/// it comes from.
fn named(text: &str, exported: &BTreeMap<String, String>) -> BTreeSet<String> {
    let code = text.split("#[cfg(test)]").next().unwrap();
    let lines = code.lines().filter(|line| !line.trim_start().starts_with("//"));
    let ends = |letter: char| !letter.is_alphanumeric() && letter != '_';
    let names = lines.flat_map(|line| line.split("crate::").skip(1)).flat_map(|rest| {
        let listed = rest.strip_prefix('{').and_then(|rest| rest.split('}').next());
        let paths = listed.map_or_else(|| vec![rest], |listed| listed.split(", ").collect());
        paths
            .into_iter()
            .map(|path| path[..path.find(ends).unwrap_or(path.len())].to_owned())
            .collect::<Vec<_>>()
    });
    names.map(|name| exported.get(&name).cloned().unwrap_or(name)).collect()
}

/// What the root re-exports, by name, with the module of each.
fn exported(root: &str) -> BTreeMap<String, String> {
    let mut exported = BTreeMap::new();
    for line in root.lines().filter_map(|line| line.strip_prefix("pub use ")) {
        let (module, names) = line.trim_end_matches(';').split_once("::").unwrap();
        for name in names.trim_matches(['{', '}']).split(", ") {
            exported.insert(name.rsplit(" as ").next().unwrap().to_owned(), module.to_owned());
        }
    }
    exported
}

fn arrows() -> Arrows {
    let folder = Path::new(env!("CARGO_MANIFEST_DIR")).join("src");
    let exported = exported(&fs::read_to_string(folder.join("lib.rs")).unwrap());
    let mut arrows = Arrows::new();
    for path in sources(&folder) {
        let relative = path.strip_prefix(&folder).unwrap();
        let is_test = relative.iter().any(|part| part == "tests" || part == "tests.rs");
        let module = relative.iter().next().unwrap().to_str().unwrap().trim_end_matches(".rs").to_owned();
        if is_test || module == "lib" || module == "main" {
            continue;
        }
        let mut used = named(&fs::read_to_string(&path).unwrap(), &exported);
        used.remove(&module);
        arrows.entry(module).or_default().extend(used);
    }
    arrows
}

#[test]
fn modules_use_each_other_in_one_direction() {
    let mut left = arrows();
    assert!(left.len() > 15 && left["engine"].contains("dispatch"), "{left:?}");
    // What uses nothing that is left can be taken away, until nothing is left; a circle cannot.
    loop {
        let below: Vec<String> =
            left.iter().filter(|(_, used)| used.is_empty()).map(|(name, _)| name.clone()).collect();
        if below.is_empty() {
            break;
        }
        for name in below {
            left.remove(&name);
            left.values_mut().for_each(|used| {
                used.remove(&name);
            });
        }
    }
    assert!(left.is_empty(), "in circles, or below names that are no module: {left:?}");
}
