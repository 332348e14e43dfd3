//! API keys of `up`: of its file, and of `--api-key`.

use super::args::UpArgs;
use crate::exit::CliError;
use remoe_gateway_core::{KeyFile, Keys};

/// Reads the keys of clients, and opens the file that has them.
pub(super) fn keys(args: &UpArgs) -> Result<(Keys, Option<KeyFile>), CliError> {
    // An empty variable in the environment is no key; an empty flag is a mistake that opens the server.
    if args.api_key.as_deref() == Some("")
        && std::env::var_os("REMOE_API_KEY").is_none_or(|key| !key.is_empty())
    {
        let message =
            "invalid --api-key: expected a key, got an empty string; omit the flag to serve without a key";
        return Err(CliError::arguments("--api-key", message));
    }
    let (file, keys) = match &args.keys {
        None => (None, Keys::none()),
        Some(path) => {
            let (file, keys) = KeyFile::open(path.clone()).map_err(|error| CliError {
                path: Some(path.clone()),
                ..CliError::arguments("--keys", error.to_string())
            })?;
            (Some(file), keys)
        }
    };
    let keys = with_own_key(keys, args.api_key.as_deref());
    Ok((keys.map_err(|message| CliError::arguments("--api-key", message))?, file))
}

/// Adds the key of `--api-key` to `keys`.
pub(super) fn with_own_key(keys: Keys, own: Option<&str>) -> Result<Keys, String> {
    let Some(own) = own.filter(|key| !key.is_empty()) else { return Ok(keys) };
    // What clients send is read without spaces around it.
    if own.trim() != own {
        return Err("invalid --api-key: expected no whitespace at its ends".to_owned());
    }
    keys.with_key("default", own).ok_or_else(|| {
        "invalid --api-key: --keys already contains this key or a tenant named default; remove one of them"
            .to_owned()
    })
}
