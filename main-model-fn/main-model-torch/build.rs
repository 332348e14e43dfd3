//! Lets the binaries find LibTorch from anywhere, without environment variables.

use std::path::Path;

fn main() {
    println!("cargo:rerun-if-changed=build.rs");
    // torch-sys says where it found LibTorch.
    let Ok(lib) = std::env::var("DEP_TCH_LIBTORCH_LIB") else {
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
