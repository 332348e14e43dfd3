//! Checks that the modules of a crate have no circular dependencies, so that each can be read with those below it
//! alone.

use std::collections::{BTreeMap, BTreeSet};
use std::fs;
use std::path::{Path, PathBuf};

use proc_macro2::{Delimiter, TokenStream, TokenTree};
use quote::ToTokens;
use remoe_test_support::binaries::workspace;
use syn::{Attribute, File, Item, UseTree};

use crate::crates;
use crate::graph::{self, Graph};

/// Returns the names that a crate's root re-exports, with their modules.
type Exports = BTreeMap<String, String>;

pub(crate) fn sources(folder: &Path) -> Vec<PathBuf> {
    let entries = fs::read_dir(folder).unwrap().map(|entry| entry.unwrap().path());
    let files = entries.flat_map(|path| if path.is_dir() { sources(&path) } else { vec![path] });
    files.filter(|path| path.extension().is_some_and(|ending| ending == "rs")).collect()
}

fn is_test(attributes: &[Attribute]) -> bool {
    attributes.iter().any(|attribute| {
        let tokens = attribute.to_token_stream().to_string();
        attribute.path().is_ident("cfg") && tokens.contains("test") || attribute.path().is_ident("test")
    })
}

fn attributes(item: &Item) -> &[Attribute] {
    match item {
        Item::Const(item) => &item.attrs,
        Item::Enum(item) => &item.attrs,
        Item::Fn(item) => &item.attrs,
        Item::Impl(item) => &item.attrs,
        Item::Macro(item) => &item.attrs,
        Item::Mod(item) => &item.attrs,
        Item::Static(item) => &item.attrs,
        Item::Struct(item) => &item.attrs,
        Item::Trait(item) => &item.attrs,
        Item::Type(item) => &item.attrs,
        Item::Union(item) => &item.attrs,
        Item::Use(item) => &item.attrs,
        _ => &[],
    }
}

/// Returns the leaves of a `use` tree: the first segment and the imported name.
fn leaves(tree: &UseTree, first: Option<&str>, into: &mut Vec<(String, String)>) {
    match tree {
        UseTree::Path(path) => {
            let segment = path.ident.to_string();
            let begins = first.is_none() && matches!(segment.as_str(), "crate" | "self");
            let first = if begins { None } else { Some(first.unwrap_or(&segment)) };
            leaves(&path.tree, first, into);
        }
        UseTree::Name(name) => {
            into.push((first.map_or_else(|| name.ident.to_string(), str::to_owned), name.ident.to_string()))
        }
        UseTree::Rename(name) => {
            into.push((first.map_or_else(|| name.ident.to_string(), str::to_owned), name.rename.to_string()));
        }
        UseTree::Group(group) => group.items.iter().for_each(|tree| leaves(tree, first, into)),
        UseTree::Glob(_) => {}
    }
}

fn exports(root: Option<&File>) -> Exports {
    let Some(file) = root else { return Exports::new() };
    let mut found = Vec::new();
    for item in &file.items {
        if let Item::Use(item) = item {
            leaves(&item.tree, None, &mut found);
        }
    }
    found.into_iter().map(|(module, name)| (name, module)).collect()
}

/// Returns the first names after `crate::`, or after the `super::` that lead from a module at `depth` to the root.
fn named(tokens: TokenStream, depth: usize, into: &mut Vec<String>) {
    let tokens: Vec<TokenTree> = tokens.into_iter().collect();
    let is = |at: usize, word: &str| matches!(tokens.get(at), Some(TokenTree::Ident(ident)) if ident == word);
    let colons = |at: usize| {
        [at, at + 1]
            .iter()
            .all(|at| matches!(tokens.get(*at), Some(TokenTree::Punct(point)) if point.as_char() == ':'))
    };
    let mut at = 0;
    while at < tokens.len() {
        let mut behind = at;
        let mut supers = 0;
        while is(behind, "super") && colons(behind + 1) {
            supers += 1;
            behind += 3;
        }
        if is(at, "crate") && colons(at + 1) {
            behind = at + 3;
        } else if supers == 0 || supers != depth {
            behind = at;
        }
        if behind > at {
            match tokens.get(behind) {
                Some(TokenTree::Ident(ident)) => into.push(ident.to_string()),
                Some(TokenTree::Group(group)) if group.delimiter() == Delimiter::Brace => {
                    firsts(group.stream(), into)
                }
                _ => {}
            }
        }
        if let TokenTree::Group(group) = &tokens[at] {
            named(group.stream(), depth, into);
        }
        at = behind.max(at + 1);
    }
}

/// Returns the first names of a list such as `{engine::Engine, error::{self, Error}}`.
fn firsts(list: TokenStream, into: &mut Vec<String>) {
    let mut begins = true;
    for token in list {
        match token {
            TokenTree::Ident(ident) if begins => {
                into.push(ident.to_string());
                begins = false;
            }
            TokenTree::Punct(point) if point.as_char() == ',' => begins = true,
            _ => {}
        }
    }
}

/// Returns the files of test-only modules.
fn for_tests(parsed: &BTreeMap<PathBuf, File>) -> BTreeSet<PathBuf> {
    let mut found = BTreeSet::new();
    for (path, file) in parsed {
        let is_root = ["lib.rs", "main.rs", "mod.rs"].iter().any(|root| path.ends_with(root));
        let below = if is_root { path.parent().unwrap().to_owned() } else { path.with_extension("") };
        for item in &file.items {
            if let Item::Mod(module) = item
                && module.content.is_none()
                && is_test(&module.attrs)
            {
                let name = module.ident.to_string();
                found.extend([below.join(format!("{name}.rs")), below.join(&name).join("mod.rs")]);
            }
        }
    }
    found
}

/// Returns the dependencies among the top-level modules of the crate in `folder`, without tests. A re-exported name
/// counts as its module's.
fn modules(folder: &Path) -> Graph {
    let parse = |path: PathBuf| {
        let file = syn::parse_file(&fs::read_to_string(&path).unwrap()).unwrap();
        (path, file)
    };
    let parsed: BTreeMap<PathBuf, File> = sources(folder).into_iter().map(parse).collect();
    let exports = exports(parsed.get(&folder.join("lib.rs")));
    let mut found = Graph::new();
    let for_tests = for_tests(&parsed);
    for (path, file) in &parsed {
        let relative = path.strip_prefix(folder).unwrap();
        let mut parts: Vec<&str> =
            relative.iter().map(|part| part.to_str().unwrap().trim_end_matches(".rs")).collect();
        if parts.iter().any(|part| matches!(*part, "tests" | "testing" | "bin" | "generated"))
            || matches!(parts[0], "lib" | "main")
        {
            continue;
        }
        if parts.last() == Some(&"mod") {
            parts.pop();
        }
        if for_tests.contains(path) {
            continue;
        }
        let mut names = Vec::new();
        for item in file.items.iter().filter(|item| !is_test(attributes(item))) {
            named(item.to_token_stream(), parts.len(), &mut names);
        }
        let module = parts[0].to_owned();
        found.entry(module).or_default().extend(names);
    }
    let known: BTreeSet<String> = found.keys().cloned().collect();
    for (module, used) in &mut found {
        let named = std::mem::take(used).into_iter();
        let modules =
            named.map(
                |name| if known.contains(&name) { name } else { exports.get(&name).cloned().unwrap_or(name) },
            );
        *used = modules.filter(|name| known.contains(name) && name != module).collect();
    }
    found
}

#[test]
fn modules_of_every_crate_form_no_circle() {
    let found: Vec<String> = crates::members()
        .into_iter()
        .filter(|member| member.folder.join("src").is_dir())
        .flat_map(|member| {
            let modules = modules(&member.folder.join("src"));
            graph::circles(&modules)
                .into_iter()
                .map(move |circle| describe(&member.name, &circle, &modules))
                .collect::<Vec<_>>()
        })
        .collect();
    assert!(found.is_empty(), "circles of modules, move what closes each of them:\n{}", found.join("\n"));
}

/// Formats a circle as `crate: a -> b, c; b -> a; ..`.
fn describe(name: &str, circle: &BTreeSet<String>, modules: &Graph) -> String {
    let lines = circle.iter().map(|module| {
        let below: Vec<&str> = modules[module].intersection(circle).map(String::as_str).collect();
        format!("    {module} -> {}", below.join(", "))
    });
    format!("{name}, {} modules:\n{}", circle.len(), lines.collect::<Vec<_>>().join("\n"))
}

#[test]
fn modules_of_main_model_fn_engine_uses_dispatch() {
    let root = workspace().join("main-model-fn/src");
    let found = modules(&root);
    assert!(found.len() > 15 && found["engine"].contains("dispatch"), "{found:?}");
}

#[test]
fn named_lists_aliases_and_nested_modules_finds_each() {
    let text = "use crate::{engine::{self, Engine}, error::Error as E}; fn f() { crate::pool::run(super::super::a::B, super::c) }";
    let file = syn::parse_file(text).unwrap();
    let mut names = Vec::new();
    file.items.iter().for_each(|item| named(item.to_token_stream(), 2, &mut names));
    assert_eq!(names, ["engine", "error", "pool", "a"]);
}
