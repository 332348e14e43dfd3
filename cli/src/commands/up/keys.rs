//! API keys of `up`, from the file of `--keys` and from `--api-key`.

use super::args::UpArgs;
use crate::exit::CliError;
use remoe_gateway_core::{KeyFile, Keys};

/// Reads the API keys of clients. Returns the file of `--keys` as well, so that it can be watched for changes.
pub(super) fn keys(args: &UpArgs) -> Result<(Keys, Option<KeyFile>), CliError> {
    // An empty REMOE_API_KEY means no key. An empty --api-key is refused, as it would leave the server without a key.
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
    // The gateway trims the keys that clients send.
    if own.trim() != own {
        return Err("invalid --api-key: expected no whitespace at its ends".to_owned());
    }
    keys.with_key("default", own).ok_or_else(|| {
        "invalid --api-key: --keys already contains this key or a tenant named default; remove one of them"
            .to_owned()
    })
}
