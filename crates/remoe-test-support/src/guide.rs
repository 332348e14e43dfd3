//! Runner of the code blocks of a documentation page, exactly as written.
//!
//! All `console` and `python` blocks run in the order of the page and in one shell. In a block that also shows
//! output, `$ ` marks the commands. A comment above a block changes this:
//!
//! - `<!-- test: file NAME -->`: the block is the content of a file, which is written before the first command runs;
//! - `<!-- test: with OLD=NEW .. -->`: placeholders are replaced;
//! - `<!-- test: skip, REASON -->`: it is not run.

use crate::binaries::{folder, workspace};
use crate::process::Process;
use std::fmt::Write as _;
use std::os::unix::fs::symlink;
use std::path::Path;
use std::process::Command;
use std::time::Duration;

/// Folders of the repository that commands use.
const FOLDERS: [&str; 5] = ["charts", "crds", "demo", "docs", "examples"];
/// Timeout of all commands of a page.
const PAGE_TIMEOUT: Duration = Duration::from_secs(540);

/// Code block of a page.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Block {
    /// Line number of its opening fence, from 1.
    pub line: usize,
    /// Language after the backticks.
    pub language: String,
    /// Lines between the fences.
    pub text: String,
    /// Directive of the comment above it.
    pub directive: Directive,
}

/// Treatment of a block.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Directive {
    /// Runs after these replacements.
    Run(Vec<(String, String)>),
    /// Writes the block to this file.
    File(String),
    /// Skips the block.
    Skip,
}

impl Directive {
    fn parse(comment: &str) -> Self {
        let (kind, rest) = comment.split_once([' ', ',']).unwrap_or((comment, ""));
        let rest = rest.trim();
        match kind {
            "file" if !rest.is_empty() => Self::File(rest.to_owned()),
            "skip" if !rest.is_empty() => Self::Skip,
            "with" => {
                let pairs = rest.split(' ').map(|pair| pair.split_once('=').expect("OLD=NEW"));
                Self::Run(pairs.map(|(old, new)| (old.to_owned(), new.to_owned())).collect())
            }
            _ => {
                panic!("invalid comment: expected file NAME, with OLD=NEW, or skip, REASON; got {comment:?}")
            }
        }
    }
}

impl Block {
    /// Returns true if the commands need a cluster.
    #[must_use]
    pub fn is_for_cluster(&self) -> bool {
        ["kubectl", "helm ", "cluster.py"].iter().any(|word| self.text.contains(word))
    }

    /// Returns the commands of a `console` block: all lines, or those after `$ ` with their continuation lines.
    fn commands(&self) -> String {
        if !self.text.lines().any(|line| line.starts_with("$ ")) {
            return self.text.clone();
        }
        let (mut commands, mut continues) = (String::new(), false);
        for line in self.text.lines() {
            let command = line.strip_prefix("$ ").or_else(|| continues.then_some(line));
            if let Some(command) = command {
                let _always_fits = writeln!(commands, "{command}");
                continues = command.ends_with('\\');
            }
        }
        commands
    }
}

/// Returns the code blocks of `page`.
///
/// # Panics
/// A comment is invalid or not directly above a block.
#[must_use]
pub fn blocks(page: &str) -> Vec<Block> {
    let (mut blocks, mut open, mut directive) = (Vec::new(), None::<Block>, None);
    for (number, line) in page.lines().enumerate() {
        match (&mut open, line.strip_prefix("```")) {
            (Some(block), None) => {
                block.text.push_str(line);
                block.text.push('\n');
            }
            (Some(_), Some(_)) => blocks.extend(open.take()),
            (None, Some(language)) => {
                let directive = directive.take().unwrap_or_else(|| Directive::Run(Vec::new()));
                let language = language.to_owned();
                open = Some(Block { line: number + 1, language, text: String::new(), directive });
            }
            (None, None) => {
                assert!(directive.is_none(), "line {number}: the comment above stands above no block");
                let comment = line.strip_prefix("<!-- test: ").and_then(|rest| rest.strip_suffix(" -->"));
                directive = comment.map(Directive::parse);
            }
        }
    }
    blocks
}

/// Returns a shell script that writes the files of `page` and runs the blocks that `is_chosen` accepts.
///
/// # Panics
/// A comment is invalid, or its block lacks a placeholder.
#[must_use]
pub fn script(page: &str, is_chosen: impl Fn(&Block) -> bool) -> String {
    let all = blocks(page);
    // Output goes to the log, which a failing test prints.
    let mut script = "exec >&2\nset -eu -o pipefail\n".to_owned();
    let mut write_file = |name: &str, text: &str| {
        let _always_fits = writeln!(script, "cat >'{name}' <<'END_OF_{name}'\n{text}END_OF_{name}");
    };
    for block in &all {
        if let Directive::File(name) = &block.directive {
            write_file(name, &block.text);
        }
    }
    for block in all.iter().filter(|block| is_chosen(block)) {
        let Directive::Run(replacements) = &block.directive else { continue };
        let mut block = block.clone();
        for (old, new) in replacements {
            assert!(block.text.contains(old), "line {}: {old} is not in the block", block.line);
            block.text = block.text.replace(old, new);
        }
        let line = block.line;
        let commands = match block.language.as_str() {
            "console" => block.commands(),
            "python" => format!("python3 - <<'END_OF_PYTHON'\n{}END_OF_PYTHON\n", block.text),
            _ => continue,
        };
        let _always_fits = write!(script, "echo '=== line {line}'\n{commands}");
    }
    script
}

/// Runs `script` in a folder like a checkout after `make build`, in its own network namespace: all ports are free and
/// no other host can be reached.
///
/// # Panics
/// A command fails.
pub async fn run(name: &str, script: &str) {
    let mut command = Command::new("unshare");
    let is_root = rustix::process::geteuid().is_root();
    command.args(if is_root { &["--net"][..] } else { &["--map-root-user", "--net"] });
    command.args(["--pid", "--fork", "--kill-child", "--mount-proc", "bash", "-c"]);
    // Without the device `lo`, not even local addresses can be reached.
    command.arg(format!("ip link set lo up\n{script}"));
    run_in_checkout(name, command, &[]).await;
}

/// Runs `script` in such a folder, with the programs in the folder `tools` and the cluster of `kubeconfig`.
///
/// # Panics
/// A command fails.
pub async fn run_in_cluster(name: &str, script: &str, tools: &Path, kubeconfig: &Path) {
    let mut command = Command::new("bash");
    // Ends background jobs of the page with it. cluster.py looks for its cluster among the processes of this host.
    command.args(["-c", &format!("trap 'kill $(jobs -p) 2>/dev/null || true' EXIT\n{script}")]);
    command.env("KUBECONFIG", kubeconfig);
    run_in_checkout(name, command, &[tools]).await;
}

async fn run_in_checkout(name: &str, mut command: Command, tools: &[&Path]) {
    let checkout = tempfile::tempdir().expect("a folder for temporary files can be made");
    fill_checkout(checkout.path());
    let home = checkout.path().join(".home");
    std::fs::create_dir(&home).expect("a folder can be made");
    let shims = workspace().join("crates/remoe-test-support/guide");
    let inherited = std::env::var_os("PATH").unwrap_or_default();
    let path = [shims.as_path()].into_iter().chain(tools.iter().copied()).map(Path::to_path_buf);
    let path = std::env::join_paths(path.chain(std::env::split_paths(&inherited)));
    command
        .current_dir(checkout.path())
        .env("PATH", path.expect("the folders can be listed"))
        .env("HOME", &home)
        .env("XDG_STATE_HOME", home.join("state"))
        .env("XDG_RUNTIME_DIR", &home)
        .env("REMOE_BIN_DIR", folder())
        .env("GUIDE_CHECKOUT", checkout.path())
        .env("GUIDE_WORKSPACE", workspace())
        .env("MIXTRAL_8X22B", shims.join("mixtral-8x22b"))
        .env_remove("REMOE_LOG");
    let mut process = Process::start(name, command, drop);
    let status = process.end(PAGE_TIMEOUT).await;
    assert!(status.success(), "{name}: {status}");
}

/// Fills `checkout` like the repository, with the model folders that guides name.
fn fill_checkout(checkout: &Path) {
    let shim = |name: &str| workspace().join("crates/remoe-test-support/guide").join(name);
    let link = |target: &Path, name: &str| {
        symlink(target, checkout.join(name)).expect("a symbolic link can be made");
    };
    for folder in FOLDERS {
        link(&workspace().join(folder), folder);
    }
    for model in ["model", "small", "large"] {
        link(&workspace().join("demo/model"), model);
    }
    // A copy, because the script looks for programs beside itself.
    let scripts = checkout.join("scripts");
    std::fs::create_dir(&scripts).expect("a folder can be made");
    let copied = std::fs::copy(workspace().join("scripts/demo.py"), scripts.join("demo.py"));
    copied.expect("scripts/demo.py can be copied");
    let programs = checkout.join("target/release");
    std::fs::create_dir_all(&programs).expect("a folder can be made");
    link(&shim("remoe"), "target/release/remoe");
    link(&workspace().join("target/images"), "target/images");
    std::fs::create_dir_all(checkout.join("tests/cluster")).expect("a folder can be made");
    link(&shim("cluster"), "tests/cluster/cluster.py");
}

#[cfg(test)]
mod tests {
    use super::*;

    const PAGE: &str = "\
Text.

<!-- test: file keys.yaml -->
```yaml
tenants: []
```

```console
$ remoe plan \\
    MODEL
output
$ remoe ps
```

<!-- test: with MODEL=demo/model -->
```console
remoe up MODEL
```

<!-- test: skip, needs a network -->
```console
remoe fetch
```
";

    #[test]
    fn guide_script_holds_commands_and_files_only() {
        let script = script(PAGE, |_| true);
        let expected = "exec >&2\nset -eu -o pipefail\n\
            cat >'keys.yaml' <<'END_OF_keys.yaml'\ntenants: []\nEND_OF_keys.yaml\n\
            echo '=== line 8'\nremoe plan \\\n    MODEL\nremoe ps\n\
            echo '=== line 16'\nremoe up demo/model\n";
        assert_eq!(script, expected);
    }

    #[test]
    #[should_panic(expected = "invalid comment")]
    fn unknown_comment_is_refused() {
        let _unused = blocks("<!-- test: maybe -->\n```console\ntrue\n```\n");
    }
}
