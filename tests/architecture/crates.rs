//! Checks of the workspace's crates: folders, dependencies, and their picture.

use std::collections::BTreeSet;
use std::fs;
use std::path::{Path, PathBuf};
use std::process::Command;

use remoe_test_support::binaries::workspace;
use serde_json::Value;

use crate::graph::{self, Graph};
use crate::modules;

/// Package of the workspace.
pub(crate) struct Member {
    pub(crate) name: String,
    pub(crate) folder: PathBuf,
    /// Packages of the workspace that it depends on, without those of its tests.
    dependencies: BTreeSet<String>,
}

/// Packages for tests and measurements, which the picture omits.
const FOR_TESTS: [&str; 6] =
    ["tests", "e2e", "bench", "remoe-test-support", "remoe-test-sources", "remoe-fuzz-harness"];
const BEGIN: &str =
    "<!-- crates: written by the test of the same name, REMOE_UPDATE_ARCHITECTURE=1 rewrites it -->\n";
const END: &str = "<!-- end of crates -->\n";

pub(crate) fn members() -> Vec<Member> {
    let cargo = std::env::var_os("CARGO")
        .filter(|cargo| Path::new(cargo).is_absolute())
        .unwrap_or_else(|| "cargo".into());
    let output = Command::new(cargo)
        .args(["metadata", "--no-deps", "--offline", "--format-version", "1"])
        .current_dir(workspace())
        .output()
        .unwrap();
    assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
    let metadata: Value = serde_json::from_slice(&output.stdout).unwrap();
    let packages = metadata["packages"].as_array().unwrap();
    packages
        .iter()
        .map(|package| {
            let manifest = Path::new(package["manifest_path"].as_str().unwrap());
            let every = package["dependencies"].as_array().unwrap().iter();
            Member {
                name: package["name"].as_str().unwrap().to_owned(),
                folder: manifest.parent().unwrap().to_owned(),
                dependencies: every
                    .filter(|dependency| dependency["path"].is_string() && dependency["kind"].is_null())
                    .map(|dependency| dependency["name"].as_str().unwrap().to_owned())
                    .collect(),
            }
        })
        .collect()
}

fn dependencies() -> Graph {
    members().into_iter().map(|member| (member.name, member.dependencies)).collect()
}

/// Returns the crates as a Mermaid flow chart, with programs apart from libraries.
fn picture() -> String {
    let mut every = dependencies();
    every.retain(|name, _| !FOR_TESTS.contains(&name.as_str()));
    let is_library = |name: &str| name.starts_with("remoe-");
    let mut text = String::from("```mermaid\nflowchart TD\n");
    for (title, library) in [("programs", false), ("crates", true)] {
        text += &format!("    subgraph {title}\n");
        every
            .keys()
            .filter(|name| is_library(name) == library)
            .for_each(|name| text += &format!("        {name}\n"));
        text += "    end\n";
    }
    for (name, below) in graph::reduced(&every) {
        below.iter().for_each(|below| text += &format!("    {name} --> {below}\n"));
    }
    text + "```\n"
}

#[test]
fn folders_are_named_as_their_packages() {
    let wrong: Vec<String> = members()
        .iter()
        .filter(|member| member.folder.file_name().unwrap() != member.name.as_str())
        .map(|member| format!("{} lies in {}", member.name, member.folder.display()))
        .collect();
    assert!(wrong.is_empty(), "{wrong:?}");
}

#[test]
fn folders_at_the_top_are_at_most_18() {
    let files = Command::new("git").args(["ls-files"]).current_dir(workspace()).output().unwrap();
    let listed = String::from_utf8(files.stdout).unwrap();
    let top: BTreeSet<&str> = listed
        .lines()
        .filter_map(|file| file.split_once('/'))
        .map(|(folder, _)| folder)
        .filter(|folder| !folder.starts_with('.'))
        .collect();
    assert!(top.contains("crates") && top.len() <= 18, "{top:?}");
}

#[test]
fn programs_are_used_by_no_library() {
    let every = dependencies();
    let programs =
        ["agent", "cli", "gateway", "operator", "remote-expert-fn", "main-model-fn", "main-model-torch"];
    for (name, below) in
        every.iter().filter(|(name, _)| name.starts_with("remoe-") && !FOR_TESTS.contains(&name.as_str()))
    {
        assert!(programs.iter().all(|program| !below.contains(*program)), "{name} depends on {below:?}");
    }
}

#[test]
fn crates_readme_has_a_line_for_each() {
    let text = fs::read_to_string(workspace().join("crates/README.md")).unwrap();
    for member in members().iter().filter(|member| member.folder.starts_with(workspace().join("crates"))) {
        assert!(
            text.contains(&format!("[`{0}`]({0}/)", member.name)),
            "crates/README.md has no line of {}",
            member.name
        );
    }
}

#[test]
fn picture_of_architecture_is_the_present_one() {
    let path = workspace().join("ARCHITECTURE.md");
    let text = fs::read_to_string(&path).unwrap();
    let (before, rest) = text.split_once(BEGIN).expect("ARCHITECTURE.md has the mark of the picture");
    let (shown, after) = rest.split_once(END).expect("ARCHITECTURE.md has the end of the picture");
    let picture = picture();
    if std::env::var_os("REMOE_UPDATE_ARCHITECTURE").is_some() {
        fs::write(&path, format!("{before}{BEGIN}{picture}{END}{after}")).unwrap();
        return;
    }
    assert_eq!(shown, picture, "run this test with REMOE_UPDATE_ARCHITECTURE=1");
}

#[test]
fn libtorch_is_linked_by_main_model_torch_alone() {
    let linked = manifests("tch");
    assert_eq!(linked, ["main-model-torch"], "these crates depend on LibTorch");
}

/// Calls are counted in the module that makes them.
#[test]
fn libtorch_is_called_by_its_library_module_alone() {
    let folder = workspace().join("main-model-fn/main-model-torch/src");
    let calls = |path: &std::path::PathBuf| {
        let text = fs::read_to_string(path).unwrap();
        text.lines().any(|line| line.contains("tch::") || line.contains("use tch"))
    };
    let callers: Vec<_> = modules::sources(&folder).into_iter().filter(calls).collect();
    assert!(callers.len() > 1, "the library calls LibTorch");
    let outside: Vec<_> = callers.iter().filter(|path| !path.starts_with(folder.join("library"))).collect();
    assert!(outside.is_empty(), "{outside:?} call LibTorch beside the library");
}

/// Returns the members whose manifests name the dependency `name`.
fn manifests(name: &str) -> Vec<String> {
    let names = |member: &Member| {
        let manifest = fs::read_to_string(member.folder.join("Cargo.toml")).unwrap();
        manifest.lines().any(|line| line.split(['.', ' ', '=']).next() == Some(name))
    };
    members().into_iter().filter(names).map(|member| member.name).collect()
}

#[test]
fn pure_crates_use_no_clock_file_or_network() {
    // Threads of `thread::scope` end before that call returns.
    let impure = ["Instant", "SystemTime", "std::fs", "std::net", "thread::sleep", "thread::spawn", "tokio"];
    let pure = ["remoe-plan", "remoe-planner", "remoe-autoscale", "remoe-hardware", "predictor"];
    for member in members().iter().filter(|member| pure.contains(&member.name.as_str())) {
        for path in modules::sources(&member.folder.join("src")) {
            let text = fs::read_to_string(&path).unwrap();
            let code = text.split("#[cfg(test)]").next().unwrap();
            let found: Vec<&str> = impure.into_iter().filter(|name| code.contains(name)).collect();
            assert!(found.is_empty(), "{} uses {found:?}", path.display());
        }
    }
}

/// Every test that ARCHITECTURE.md names for an invariant exists.
#[test]
fn invariants_name_tests_that_exist() {
    let text = fs::read_to_string(workspace().join("ARCHITECTURE.md")).unwrap();
    let (_, invariants) = text.split_once("## Invariants").unwrap();
    let (invariants, _) = invariants.split_once("\n## ").unwrap();
    let is_test = |name: &&str| {
        name.contains('_')
            && name
                .chars()
                .all(|letter| letter.is_ascii_lowercase() || letter == '_' || letter.is_ascii_digit())
    };
    let named: BTreeSet<&str> = invariants.split('`').skip(1).step_by(2).filter(is_test).collect();
    let code: String = members()
        .iter()
        .flat_map(|member| modules::sources(&member.folder))
        .map(|path| fs::read_to_string(path).unwrap())
        .collect();
    let missing: Vec<&str> =
        named.iter().filter(|name| !code.contains(&format!("fn {name}("))).copied().collect();
    assert!(named.len() >= 11 && missing.is_empty(), "{missing:?} of {named:?}");
}
