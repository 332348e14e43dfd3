//! Files of hardware profiles in the user's cache folder.

use crate::device::MainDevice;
use crate::exit::CliError;
use remoe_hardware::{ModelId, Origin, Profile};
use std::path::{Path, PathBuf};

/// Returns the path of the profile of a model whose main function runs on `device` of this machine.
pub(crate) fn default_path(model: &ModelId, device: &MainDevice) -> PathBuf {
    let cache = std::env::var_os("XDG_CACHE_HOME").map(PathBuf::from);
    let home = || std::env::var_os("HOME").map(|home| PathBuf::from(home).join(".cache"));
    let folder = cache.or_else(home).unwrap_or_else(std::env::temp_dir);
    let fingerprint = model.fingerprint.get(..16).unwrap_or(&model.fingerprint);
    folder.join("remoe").join("profiles").join(format!(
        "{fingerprint}-{}-{}.json",
        model.precision(),
        device.file_slug()
    ))
}

fn path_of(profile: &Profile) -> PathBuf {
    default_path(&profile.model, &MainDevice::of_profile(profile))
}

/// Saves `profile` at its default path, and returns the path.
pub(crate) fn save(profile: &Profile) -> Result<PathBuf, CliError> {
    let path = path_of(profile);
    path.parent().map_or(Ok(()), std::fs::create_dir_all).map_err(|error| write_error(&path, &error))?;
    save_to(profile, &path)?;
    Ok(path)
}

/// Saves `profile` at its default path. Does nothing if its figures are assumed, or if another process saved a newer
/// undisturbed profile meanwhile.
pub(crate) fn save_if_newer(profile: &Profile) -> Result<(), CliError> {
    if profile.certainty() == Origin::Prior {
        return Ok(());
    }
    let known = std::fs::read_to_string(path_of(profile)).ok();
    let known = known.and_then(|text| Profile::from_json(&text).ok());
    match known.filter(|known| known.disturbed.is_none() && known.made.date >= profile.made.date) {
        Some(_) => Ok(()),
        None => save(profile).map(drop),
    }
}

/// Saves `profile` at `path`.
pub(crate) fn save_to(profile: &Profile, path: &Path) -> Result<(), CliError> {
    let text = serde_json::to_string_pretty(profile)
        .map_err(|error| CliError::runtime(format!("cannot write the profile: {error}")))?;
    write_atomically(path, text.as_bytes())
}

/// Writes a file atomically.
pub(crate) fn write_atomically(path: &Path, bytes: &[u8]) -> Result<(), CliError> {
    // Renamed into place, because other processes may read the file at any time.
    let partial = path.with_extension(format!("{}.partial", std::process::id()));
    let written = std::fs::write(&partial, bytes).and_then(|()| std::fs::rename(&partial, path));
    written.map_err(|error| write_error(path, &error))
}

fn write_error(path: &Path, error: &std::io::Error) -> CliError {
    CliError {
        path: Some(path.to_owned()),
        ..CliError::runtime(format!("cannot write {}: {error}", path.display()))
    }
}
