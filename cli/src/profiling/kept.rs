//! Profiles in files.

use crate::device::MainDevice;
use crate::exit::CliError;
use remoe_hardware::{ModelId, Origin, Profile};
use std::path::{Path, PathBuf};

/// Where the profile of a model with its main function on `device` of this machine is kept.
pub(crate) fn default_path(model: &ModelId, device: &MainDevice) -> PathBuf {
    let cache = std::env::var_os("XDG_CACHE_HOME").map(PathBuf::from);
    let home = || std::env::var_os("HOME").map(|home| PathBuf::from(home).join(".cache"));
    let folder = cache.or_else(home).unwrap_or_else(std::env::temp_dir);
    let short = model.fingerprint.get(..16).unwrap_or(&model.fingerprint);
    folder.join("remoe").join("profiles").join(format!(
        "{short}-{}-{}.json",
        model.precision(),
        device.word()
    ))
}

fn path_of(profile: &Profile) -> PathBuf {
    default_path(&profile.model, &MainDevice::of(profile))
}

/// Stores `profile` where it is looked for, and says where that is.
pub(crate) fn keep(profile: &Profile) -> Result<PathBuf, CliError> {
    let path = path_of(profile);
    path.parent().map_or(Ok(()), std::fs::create_dir_all).map_err(|error| unwritten(&path, &error))?;
    store(profile, &path)?;
    Ok(path)
}

/// Stores `profile`, unless another process measured all of the model undisturbed in the meantime, or figures of its
/// device are assumed.
pub(crate) fn keep_unless_known(profile: &Profile) -> Result<(), CliError> {
    if profile.certainty() == Origin::Prior {
        return Ok(());
    }
    let known = std::fs::read_to_string(path_of(profile)).ok();
    let known = known.and_then(|text| Profile::from_json(&text).ok());
    match known.filter(|known| known.disturbed.is_none() && known.made.date >= profile.made.date) {
        Some(_) => Ok(()),
        None => keep(profile).map(drop),
    }
}

/// Stores `profile` at `path`.
pub(crate) fn store(profile: &Profile, path: &Path) -> Result<(), CliError> {
    let text = serde_json::to_string_pretty(profile)
        .map_err(|error| CliError::runtime(format!("cannot write the profile: {error}")))?;
    write(path, text.as_bytes())
}

/// Writes a whole file at once.
pub(crate) fn write(path: &Path, bytes: &[u8]) -> Result<(), CliError> {
    // Others may read it meanwhile.
    let partial = path.with_extension(format!("{}.partial", std::process::id()));
    let written = std::fs::write(&partial, bytes).and_then(|()| std::fs::rename(&partial, path));
    written.map_err(|error| unwritten(path, &error))
}

fn unwritten(path: &Path, error: &std::io::Error) -> CliError {
    CliError {
        path: Some(path.to_owned()),
        ..CliError::runtime(format!("cannot write {}: {error}", path.display()))
    }
}
