//! `remoe completions` and `remoe man`: completion scripts of shells, and manual pages.

use crate::exit::CliError;
use clap::{Args, Command};
use clap_complete::Shell;
use std::io::Write;
use std::path::PathBuf;

#[derive(Debug, Args)]
pub(crate) struct CompletionsArgs {
    /// The shell
    pub(crate) shell: clap_complete::Shell,
}

#[derive(Debug, Args)]
pub(crate) struct ManArgs {
    /// Output folder; created if missing
    #[arg(value_name = "DIR")]
    pub(crate) folder: PathBuf,
}

/// Bash function that completes the model names of `remoe stop`, and delegates other words to the generated function.
/// Names are quoted, and never expanded.
const BASH_MODELS: &str = r#"
_remoe_or_models() {
    local word=${COMP_WORDS[COMP_CWORD]}
    if [[ ${COMP_WORDS[1]} != stop || $COMP_CWORD -lt 2 || $word == -* ]]; then
        _remoe "$@"
        return
    fi
    COMPREPLY=()
    local name
    while IFS= read -r name; do
        [[ $name == "$word"* ]] && COMPREPLY+=("$(printf %q "$name")")
    done < <(remoe ps --quiet 2>/dev/null)
}
complete -F _remoe_or_models -o bashdefault -o default remoe
"#;

const FISH_MODELS: &str = r#"
complete -c remoe -n "__fish_remoe_using_subcommand stop" -f -a "(remoe ps --quiet 2>/dev/null)"
"#;

const ZSH_MODELS: &str = r#"
(( $+functions[_remoe_models] )) ||
_remoe_models() {
    local -a names
    names=(${(f)"$(remoe ps --quiet 2>/dev/null)"})
    compadd -a names
}
"#;

/// Prints the completion script of a shell.
pub(crate) fn run(args: &CompletionsArgs, mut command: Command) -> Result<(), CliError> {
    let mut script = Vec::new();
    clap_complete::generate(args.shell, &mut command, "remoe", &mut script);
    let script = String::from_utf8_lossy(&script);
    let script = match args.shell {
        Shell::Bash => format!("{script}{BASH_MODELS}"),
        Shell::Fish => format!("{script}{FISH_MODELS}"),
        Shell::Zsh => with_zsh_models(&script),
        _ => script.into_owned(),
    };
    std::io::stdout().write_all(script.as_bytes())?;
    Ok(())
}

/// Adds the completion of `remoe stop` to the script for zsh.
fn with_zsh_models(script: &str) -> String {
    let lines = script.lines().map(|line| match line.starts_with("'::what -- Model name") {
        true => line.replacen(":_default'", ":_remoe_models'", 1),
        false => line.to_owned(),
    });
    let script = lines.collect::<Vec<_>>().join("\n");
    // Inserted before the last statement, which calls the defined functions.
    match script.rfind("\nif [ \"$funcstack[1]\"") {
        Some(end) => format!("{}{ZSH_MODELS}{}\n", &script[..end], &script[end..]),
        None => script + "\n",
    }
}

/// Writes a manual page for each command.
pub(crate) fn man(args: &ManArgs, command: Command) -> Result<(), CliError> {
    let failed = |error: std::io::Error| CliError {
        path: Some(args.folder.clone()),
        ..CliError::arguments(
            "DIR",
            format!("cannot write manual pages to {}: {error}", args.folder.display()),
        )
    };
    std::fs::create_dir_all(&args.folder).map_err(failed)?;
    clap_mangen::generate_to(command, &args.folder).map_err(failed)
}
