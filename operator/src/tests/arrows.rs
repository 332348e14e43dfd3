//! Modules of a crate use each other in one direction: reading one takes only those below it.

use std::collections::{BTreeMap, BTreeSet};
use std::fs;
use std::path::{Path, PathBuf};

/// Modules that each module of a crate's root uses, by name.
type Arrows = BTreeMap<String, BTreeSet<String>>;

/// Returns the source files below `folder`.
fn sources(folder: &Path) -> Vec<PathBuf> {
    let entries = fs::read_dir(folder).unwrap().map(|entry| entry.unwrap().path());
    let files = entries.flat_map(|path| if path.is_dir() { sources(&path) } else { vec![path] });
    files.filter(|path| path.extension().is_some_and(|extension| extension == "rs")).collect()
}

/// Returns the code of a file without comments and tests.
fn code(text: &str) -> String {
    let end = ["#[cfg(test)]\nmod ", "#[cfg(test)]\n#[allow", "#[cfg(test)]\npub(crate) mod "];
    let end = end.iter().filter_map(|begin| text.find(begin)).min().unwrap_or(text.len());
    text[..end].lines().filter(|line| !line.trim_start().starts_with("//")).collect::<Vec<_>>().join("\n")
}

/// Returns the names that `code` of a module `depth` levels below the root takes from the root.
fn taken(code: &str, depth: usize) -> BTreeSet<String> {
    let is_part = |letter: char| letter.is_alphanumeric() || letter == '_';
    let mut names = BTreeSet::new();
    for prefix in ["crate::".to_owned(), "super::".repeat(depth)] {
        for (at, _) in code.match_indices(&prefix) {
            let before = &code[..at];
            if before.ends_with(is_part) || before.ends_with("::") {
                continue;
            }
            let rest = &code[at + prefix.len()..];
            let listed = rest.strip_prefix('{').and_then(|rest| rest.split('}').next());
            let paths = listed.map_or_else(|| vec![rest], |listed| listed.split(',').collect());
            let first =
                |path: &str| path.trim().split(|letter| !is_part(letter)).next().unwrap_or("").to_owned();
            names.extend(paths.into_iter().map(first));
        }
    }
    // Parents in between are no modules of the root.
    names.retain(|name| !name.is_empty() && name != "super" && name != "self");
    names
}

/// Returns the modules of the root that are compiled for tests alone.
fn only_for_tests(root: &str) -> BTreeSet<String> {
    let lines: Vec<&str> = root.lines().collect();
    let declared = lines.iter().enumerate().filter_map(|(at, line)| {
        let name = line.trim_start_matches("pub ").strip_prefix("mod ")?.strip_suffix(';')?;
        let attributes = lines[..at].iter().rev().take_while(|line| line.starts_with("#["));
        attributes.into_iter().any(|line| line.contains("test")).then(|| name.to_owned())
    });
    declared.collect()
}

/// Returns what the root exports by name, with the module of each.
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

/// Returns which modules of the root use which, for a crate with its sources in the folder `src`.
fn arrows(src: &Path) -> Arrows {
    let root = fs::read_to_string(src.join("lib.rs")).unwrap();
    let (exported, only_for_tests) = (exported(&root), only_for_tests(&root));
    let mut arrows = Arrows::new();
    for path in sources(src) {
        let parts: Vec<&str> =
            path.strip_prefix(src).unwrap().iter().map(|part| part.to_str().unwrap()).collect();
        let module = parts[0].trim_end_matches(".rs").to_owned();
        let is_test = parts.iter().any(|part| matches!(part.trim_end_matches(".rs"), "tests"));
        if is_test || only_for_tests.contains(&module) || matches!(module.as_str(), "lib" | "main") {
            continue;
        }
        let depth = parts.len() - usize::from(parts.last() == Some(&"mod.rs"));
        let names = taken(&code(&fs::read_to_string(&path).unwrap()), depth);
        let used = names.into_iter().map(|name| exported.get(&name).cloned().unwrap_or(name));
        arrows.entry(module.clone()).or_default().extend(used.filter(|name| *name != module));
    }
    arrows
}

/// Returns the modules that use each other in circles, or use names that are no module, with what they use.
fn circles(mut arrows: Arrows) -> Arrows {
    // A module that uses none of those left is removed, until none is left; a circle stays.
    while let Some(name) = arrows.iter().find(|(_, used)| used.is_empty()).map(|(name, _)| name.clone()) {
        arrows.remove(&name);
        arrows.values_mut().for_each(|used| {
            used.remove(&name);
        });
    }
    arrows
}

#[test]
fn modules_use_each_other_in_one_direction() {
    let arrows = arrows(&Path::new(env!("CARGO_MANIFEST_DIR")).join("src"));
    assert!(arrows.len() > 50 && arrows["reconcile"].contains("status"), "{arrows:?}");
    assert!(arrows["identity"].contains("ownership") && arrows["api"].is_empty(), "{arrows:?}");
    assert_eq!(circles(arrows), Arrows::new());
}

/// Returns the modules of the operator, by their paths, whose code without whitespace holds one of `parts`.
fn modules_with(parts: &[&str]) -> BTreeSet<String> {
    let src = Path::new(env!("CARGO_MANIFEST_DIR")).join("src");
    let modules = sources(&src).into_iter().filter_map(|path| {
        let name = path.strip_prefix(&src).unwrap().to_str().unwrap().to_owned();
        let code: String = code(&fs::read_to_string(&path).unwrap()).split_whitespace().collect();
        let is_test = name.starts_with("test");
        (!is_test && parts.iter().any(|part| code.contains(part))).then_some(name)
    });
    modules.collect()
}

#[test]
fn observed_is_built_in_one_place_and_never_assigned() {
    let built = modules_with(&["Ok(Observed{", "=Observed{", "(Observed{", "Observed::default()"]);
    assert_eq!(built, BTreeSet::from(["read.rs".to_owned()]));
    let fields =
        ["pods", "plans", "model", "routing", "details", "heard", "serving", "demand", "gateways", "now"];
    for field in fields {
        let assigned = modules_with(&[&format!("observed.{field}=")]);
        let compared = modules_with(&[&format!("observed.{field}==")]);
        assert_eq!(assigned.difference(&compared).next(), None, "{field}");
    }
}

#[test]
fn apply_stage_and_certificates_alone_write() {
    let verbs = ["apply(", "apply_status(", "create(", "replace(", "replace_status(", "merge(", "delete::<"];
    let writes = verbs.map(|verb| format!("calls.{verb}"));
    let writes: Vec<&str> = writes.iter().map(String::as_str).chain(["recorder.publish("]).collect();
    let writers = modules_with(&writes);
    let certificates = ["authority", "certificate", "mod"].map(|name| format!("identity/{name}.rs"));
    let expected: BTreeSet<String> = certificates.into_iter().chain(["apply.rs".to_owned()]).collect();
    assert_eq!(writers, expected);
}

#[test]
fn circle_of_modules_is_found() {
    let of = |used: &[&str]| used.iter().map(|name| (*name).to_owned()).collect();
    let straight =
        [("a".to_owned(), of(&["b", "c"])), ("b".to_owned(), of(&["c"])), ("c".to_owned(), of(&[]))];
    assert_eq!(circles(straight.clone().into()), Arrows::new());
    let mut round = Arrows::from(straight);
    round.get_mut("c").unwrap().insert("a".to_owned());
    assert_eq!(circles(round).len(), 3);
}

#[test]
fn uses_are_found_however_they_are_written() {
    let code = code(
        "use super::{\n    a,\n    b::C,\n};\nuse crate::d::E;\n// crate::f\nfn g() { crate::h::i(); super::super::j(); }\n\
         #[cfg(test)]\nmod tests { use crate::k; }",
    );
    let names = |names: &[&str]| names.iter().map(|name| (*name).to_owned()).collect::<BTreeSet<String>>();
    assert_eq!(taken(&code, 1), names(&["a", "b", "d", "h"]));
    assert_eq!(taken(&code, 2), names(&["d", "h", "j"]));
}
