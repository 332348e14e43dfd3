//! Machines with a GPU: which device runs, is planned for and is told of. The driver's files, `nvidia-smi` and LibTorch
//! are made up, and the functions are fakes.

use crate::machine::{fixture, object};
use remoe_hardware::{Origin, Profile};
use remoe_model::{Checkpoint, ExpertsDtype};
use remoe_test_support::fake;
use rustix::process::{Pid, Signal, kill_process};
use serde_json::{Value, json};
use std::io::{BufRead, BufReader, Read};
use std::path::Path;
use std::process::{Command, Stdio};

const GPU: &str = "NVIDIA H200";
const DRIVER: &str = "580.65.06";

/// LibTorch that the torch program is linked with.
#[derive(Clone, Copy, PartialEq)]
enum Linked {
    Cpu,
    Cuda,
}

/// A machine whose root, programs, cache and state are in one folder.
struct TestMachine(tempfile::TempDir);

impl TestMachine {
    /// A machine with a GPU and its driver.
    fn with_gpu(driver: &str, linked: Linked) -> Self {
        let machine = Self(tempfile::tempdir().unwrap());
        let folder = machine.folder();
        fake::programs(folder);
        let gpu = "root/proc/driver/nvidia/gpus/0000:17:00.0/information";
        for (path, text) in [
            ("root/dev/nvidiactl", String::new()),
            (
                "root/proc/driver/nvidia/version",
                format!(
                    "NVRM version: NVIDIA UNIX x86_64 Kernel Module  {driver}  Wed\nGCC version: 12.2.0\n"
                ),
            ),
            (gpu, format!("Model: \t\t {GPU}\nIRQ:   \t\t 16\n")),
            ("torch/build-version", "2.11.0+made-up\n".to_owned()),
        ] {
            let path = folder.join(path);
            std::fs::create_dir_all(path.parent().unwrap()).unwrap();
            std::fs::write(path, text).unwrap();
        }
        let tool = folder.join("tools");
        std::fs::create_dir_all(&tool).unwrap();
        fake::script(&tool, "nvidia-smi", &format!("#!/bin/sh\necho '{GPU}, 9.0, 143771'\n"));
        machine.link(linked);
        machine
    }

    fn folder(&self) -> &Path {
        self.0.path()
    }

    /// Makes a torch program that loads libraries of LibTorch's names, and becomes the fake main function.
    fn link(&self, linked: Linked) {
        let folder = self.folder();
        let lib = folder.join("torch/lib");
        std::fs::create_dir_all(&lib).unwrap();
        let cc = |arguments: &[&str]| {
            let status = Command::new("cc").args(arguments).current_dir(folder).status();
            assert!(status.unwrap().success(), "cc {arguments:?}");
        };
        let mut libraries = vec!["torch/lib/libtorch_cpu.so"];
        if linked == Linked::Cuda {
            libraries.extend(["torch/lib/libtorch_cuda.so", "torch/lib/libcudart.so.13"]);
        }
        for library in &libraries {
            let name = format!("-Wl,-soname,{}", Path::new(library).file_name().unwrap().to_str().unwrap());
            cc(&["-shared", "-o", library, &name, "-x", "c", "/dev/null"]);
        }
        let source = format!(
            "#include <fcntl.h>\n#include <unistd.h>\nint main(int n, char **arguments) {{\n\
             close(open(\"{0}/torch-ran\", O_CREAT | O_WRONLY, 0600));\n\
             return execv(\"{0}/main-model-fn\", arguments);\n}}\n",
            folder.display()
        );
        std::fs::write(folder.join("torch.c"), source).unwrap();
        let program =
            ["torch.c", "-o", "main-model-fn-torch", "-Wl,--no-as-needed", "-Wl,-rpath,$ORIGIN/torch/lib"];
        cc(&[&program[..], &libraries].concat());
    }

    fn remoe(&self, arguments: &[&str]) -> Command {
        let mut command = Command::new(env!("CARGO_BIN_EXE_remoe"));
        let path = std::env::var("PATH").unwrap();
        let path = format!("{}:{path}", self.folder().join("tools").display());
        command
            .args(arguments)
            .env("PATH", path)
            .env("REMOE_HOST_ROOT", self.folder().join("root"))
            .env("REMOE_BIN_DIR", self.folder())
            .env("XDG_CACHE_HOME", self.folder().join("cache"))
            .env("XDG_RUNTIME_DIR", self.folder())
            .env("XDG_STATE_HOME", self.folder())
            .env_remove("CUDA_VISIBLE_DEVICES")
            .env_remove("REMOE_BACKEND")
            .env_remove("REMOE_LOG")
            .stdin(Stdio::null());
        command
    }

    /// The check of the doctor by this name.
    fn check(&self, name: &str) -> Value {
        let output = self.remoe(&["doctor", "--json"]).output().unwrap();
        let report = object(&output);
        let checks = report["checks"].as_array().unwrap();
        checks.iter().find(|check| check["name"] == name).unwrap().clone()
    }

    /// Runs `up` until it is ready; returns what it printed and its warnings.
    fn up(&self, adjust: impl FnOnce(&mut Command)) -> (String, String) {
        let model = fixture("mixtral-basic");
        let mut command = self.remoe(&["up", &model, "--port", "0"]);
        adjust(&mut command);
        let mut up = command.stdout(Stdio::piped()).stderr(Stdio::piped()).spawn().unwrap();
        let mut printed = String::new();
        let mut lines = BufReader::new(up.stdout.take().unwrap());
        while !printed.contains("Ctrl-C stops it") && lines.read_line(&mut printed).unwrap() > 0 {}
        kill_process(Pid::from_child(&up), Signal::TERM).unwrap();
        let mut warnings = String::new();
        up.stderr.take().unwrap().read_to_string(&mut warnings).unwrap();
        assert!(up.wait().unwrap().success(), "{printed}{warnings}");
        (printed, warnings)
    }

    /// The device that the last main function was given, and whether it was LibTorch's.
    fn ran(&self) -> (String, bool) {
        let commands = fake::commands(self.folder());
        let main = commands.iter().rfind(|line| line.starts_with("main ")).unwrap();
        let mut words = main.split(' ').skip_while(|word| *word != "--device");
        (words.nth(1).unwrap_or("none").to_owned(), self.folder().join("torch-ran").exists())
    }
}

#[test]
fn up_on_a_gpu_host_runs_and_plans_for_the_gpu() {
    let machine = TestMachine::with_gpu(DRIVER, Linked::Cuda);
    let (printed, warnings) = machine.up(|_| {});
    assert_eq!(machine.ran(), ("cuda".to_owned(), true), "{printed}{warnings}");
    assert!(!warnings.contains("warning"), "{warnings}");
    // The GPU of the default price list is paid for.
    let cost = printed.lines().find(|line| line.starts_with("cost: ")).unwrap();
    let dollars: f64 = cost.split(['$', ' ']).filter_map(|word| word.parse().ok()).next().unwrap();
    assert!(dollars >= 1.0, "{printed}");
}

#[test]
fn up_with_a_device_or_hidden_gpus_runs_on_cpus() {
    for (arguments, visible) in [(&["--device", "cpu"][..], None), (&[], Some("")), (&[], Some("-1"))] {
        let machine = TestMachine::with_gpu(DRIVER, Linked::Cuda);
        let (printed, warnings) = machine.up(|command| {
            command.args(arguments);
            visible.map(|visible| command.env("CUDA_VISIBLE_DEVICES", visible));
        });
        assert_eq!(machine.ran(), ("cpu".to_owned(), false), "{printed}{warnings}");
        assert!(!warnings.contains("warning"), "{warnings}");
    }
}

#[test]
fn up_on_a_gpu_host_never_serves_on_the_cpu_silently() {
    let without = TestMachine::with_gpu(DRIVER, Linked::Cuda);
    std::fs::remove_file(without.folder().join("main-model-fn-torch")).unwrap();
    for (machine, why) in [
        (
            TestMachine::with_gpu(DRIVER, Linked::Cpu),
            "its LibTorch is for CPUs; rebuild with `make build CUDA=1`",
        ),
        (
            TestMachine::with_gpu("570.1.2", Linked::Cuda),
            "CUDA 13 needs NVIDIA driver 580 or later, found 570.1.2",
        ),
        (without, "main-model-fn-torch is not there; build it"),
    ] {
        let (printed, warnings) = machine.up(|_| {});
        assert_eq!(machine.ran(), ("cpu".to_owned(), false), "{printed}{warnings}");
        assert!(warnings.contains("serving on the CPU although there is a GPU"), "{warnings}");
        assert!(warnings.contains(why), "{why}: {warnings}");
        assert_eq!(warnings.matches("serving on the CPU").count(), 1, "{warnings}");
    }
}

#[test]
fn plans_use_the_profile_of_the_device_that_runs() {
    let machine = TestMachine::with_gpu(DRIVER, Linked::Cuda);
    let model = fixture("mixtral-basic");
    let facts = Checkpoint::open(&model).unwrap().inspect().unwrap();
    let profiles = machine.folder().join("cache/remoe/profiles");
    std::fs::create_dir_all(&profiles).unwrap();
    let keep = |word: &str, profile: Profile| {
        let profile = Profile { origin: Origin::Measured, ..profile };
        let name = format!("{}-float32-{word}.json", &facts.fingerprint[..16]);
        std::fs::write(profiles.join(name), serde_json::to_string(&profile).unwrap()).unwrap();
    };
    let plan = |arguments: &[&str]| {
        let arguments = [&["plan", "--model", &model, "--json"][..], arguments].concat();
        object(&machine.remoe(&arguments).output().unwrap())
    };
    let on_cpu = Profile::prior(&facts, "float32");
    keep("cpu", on_cpu.clone());
    // One that stands by the wrong name is not used either.
    keep("cuda-nvidia-h200", on_cpu);
    let refused = plan(&[]);
    let message = refused["error"]["message"].as_str().unwrap();
    assert!(message.contains("no profile of this model in float32 on cuda of this machine"), "{refused}");
    keep("cuda-nvidia-h200", Profile::prior_on_gpu(&facts, "float32"));
    assert_eq!(plan(&[])["problem"]["device"], "gpu");
    // Beside quantised experts a CPU would keep the rest as int8, a GPU does not.
    let quantised = facts.clone().kept_as(Some(ExpertsDtype::Int8), None, "cuda");
    let profile = Profile { origin: Origin::Measured, ..Profile::prior_on_gpu(&quantised, "float32") };
    let name = format!("{}-float32-int8-cuda-nvidia-h200.json", &facts.fingerprint[..16]);
    std::fs::write(profiles.join(name), serde_json::to_string(&profile).unwrap()).unwrap();
    assert_eq!(plan(&["--experts-dtype", "int8"])["problem"]["device"], "gpu");
    // The memory is that of one GPU, as nvidia-smi says.
    let bytes = json!((143_771_u64 << 20) as f64);
    assert_eq!(plan(&[])["problem"]["limits"]["gpu_bytes"].as_f64(), bytes.as_f64());
}

#[test]
fn profile_of_another_device_is_refused() {
    let machine = TestMachine::with_gpu(DRIVER, Linked::Cuda);
    let model = fixture("mixtral-basic");
    let facts = Checkpoint::open(&model).unwrap().inspect().unwrap();
    for (profile, device, wanted) in [
        (Profile::prior(&facts, "float32"), "cuda", "expected cuda, got cpu"),
        (Profile::prior_on_gpu(&facts, "float32"), "cpu", "expected cpu, got cuda"),
    ] {
        let path = machine.folder().join("profile.json");
        let profile = Profile { origin: Origin::Measured, ..profile };
        std::fs::write(&path, serde_json::to_string(&profile).unwrap()).unwrap();
        let arguments = ["up", &model, "--port", "0", "--json", "--device", device, "--profile"];
        let output = machine.remoe(&arguments).arg(&path).output().unwrap();
        let error = &object(&output)["error"];
        assert_eq!((output.status.code(), &error["field"]), (Some(2), &json!("--profile")), "{error}");
        assert!(error["message"].as_str().unwrap().contains(wanted), "{error}");
    }
}

#[test]
fn doctor_says_which_gpu_driver_and_libtorch_there_are() {
    let machine = TestMachine::with_gpu(DRIVER, Linked::Cuda);
    let (gpu, libtorch) = (machine.check("GPU"), machine.check("LibTorch"));
    assert_eq!(gpu["status"], "ok", "{gpu}");
    for part in [GPU, "compute capability 9.0", DRIVER] {
        assert!(gpu["found"].as_str().unwrap().contains(part), "{part}: {gpu}");
    }
    assert_eq!(libtorch["status"], "ok", "{libtorch}");
    let found = libtorch["found"].as_str().unwrap();
    assert!(found.contains("LibTorch 2.11.0+made-up for GPUs with CUDA 13, in "), "{found}");
    for (machine, advice) in [
        (TestMachine::with_gpu(DRIVER, Linked::Cpu), "its LibTorch is for CPUs"),
        (
            TestMachine::with_gpu("535.183.01", Linked::Cuda),
            "needs NVIDIA driver 580 or later, found 535.183.01",
        ),
    ] {
        let libtorch = machine.check("LibTorch");
        assert_eq!(libtorch["status"], "warn", "{libtorch}");
        assert!(libtorch["advice"].as_str().unwrap().contains(advice), "{libtorch}");
    }
    // A driver whose tool fails.
    fake::script(&machine.folder().join("tools"), "nvidia-smi", "#!/bin/sh\nexit 9\n");
    let gpu = machine.check("GPU");
    assert_eq!(gpu["status"], "warn", "{gpu}");
    assert!(gpu["found"].as_str().unwrap().contains("nvidia-smi failed"), "{gpu}");
}

#[test]
fn doctor_names_a_libtorch_that_is_missing() {
    let machine = TestMachine::with_gpu(DRIVER, Linked::Cpu);
    std::fs::remove_file(machine.folder().join("torch/lib/libtorch_cpu.so")).unwrap();
    let libtorch = machine.check("LibTorch");
    assert_eq!(libtorch["status"], "warn", "{libtorch}");
    assert!(libtorch["found"].as_str().unwrap().contains("cannot find libtorch_cpu.so"), "{libtorch}");
    std::fs::remove_file(machine.folder().join("main-model-fn-torch")).unwrap();
    assert!(machine.check("LibTorch")["advice"].as_str().unwrap().contains("make build CUDA=1"));
}

#[test]
fn doctor_without_a_gpu_is_content_with_any_libtorch() {
    let machine = TestMachine::with_gpu(DRIVER, Linked::Cpu);
    std::fs::remove_file(machine.folder().join("root/dev/nvidiactl")).unwrap();
    assert_eq!(
        machine.check("GPU"),
        json!({"name": "GPU", "status": "ok", "found": "none; models run on the CPU", "advice": null})
    );
    let libtorch = machine.check("LibTorch");
    assert!(
        libtorch["status"] == "ok" && libtorch["found"].as_str().unwrap().contains("for CPUs"),
        "{libtorch}"
    );
    let (_, warnings) = machine.up(|_| {});
    assert!(!warnings.contains("warning"), "{warnings}");
}
