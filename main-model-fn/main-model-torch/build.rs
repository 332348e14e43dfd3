//! Lets the programs find LibTorch from anywhere, without environment variables, and makes optimised ones smaller.

use std::env::var;
use std::path::Path;

fn main() {
    println!("cargo:rerun-if-changed=build.rs");
    fold_identical_functions();
    // torch-sys passes on where it found LibTorch.
    let Ok(lib) = var("DEP_TCH_LIBTORCH_LIB") else {
        return;
    };
    println!("cargo:rustc-link-arg=-Wl,-rpath,{lib}");
    // CUDA registers itself when its library is loaded; nothing refers to it by symbol, so the
    // linker would leave it out.
    if Path::new(&lib).join("libtorch_cuda.so").exists() {
        println!("cargo:rustc-link-arg=-Wl,--no-as-needed");
        println!("cargo:rustc-link-arg=-ltorch_cuda");
    }
}

/// Functions of the same machine code become one in programs of the profile `dist`. Nothing here compares addresses of
/// functions. On other targets rustc links with a linker that may not know the option.
fn fold_identical_functions() {
    let is = |name: &str, value: &str| var(name).is_ok_and(|found| found == value);
    let links_by_lld = is("CARGO_CFG_TARGET_ARCH", "x86_64")
        && is("CARGO_CFG_TARGET_OS", "linux")
        && is("CARGO_CFG_TARGET_ENV", "gnu");
    if links_by_lld && is("OPT_LEVEL", "3") {
        println!("cargo:rustc-link-arg=-Wl,--icf=all");
    }
}
