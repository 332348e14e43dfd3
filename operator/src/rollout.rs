//! The pure step for pods and routing: from what is to run, what is there and what main functions were
//! told to what is to be done.
//!
//! What is to run is built beside what runs. Main functions are told of it when all of it is ready, and
//! what they no longer use goes. Nothing is remembered between two steps: a step that was interrupted
//! anywhere is made again from what is there.

use super::api::RolloutStrategy;
use super::build::{Function, Hosted, Revision};
use super::digest::digest;
use super::fleet::Silence;
use super::names::{PodName, next_incarnation};
use super::pods::{PodView, Trouble};
use super::replacement::Replacements;
use super::routing::{Generation, RoutedPod, RoutingTable};
use jiff::{SignedDuration, Timestamp};
use remoe_wire::format_listing;

/// The second replacement of a place waits this long after the first, and each further one twice as
/// long as the one before.
const FIRST_PAUSE: SignedDuration = SignedDuration::from_secs(10);
const LONGEST_PAUSE: SignedDuration = SignedDuration::from_secs(300);
/// A pod with which something is wrong is not waited for until the longest answer is finished.
const FAULTY_GRACE_SECONDS: u32 = 45;

/// What a step sees.
#[derive(Debug, Clone, Copy)]
pub struct Scene<'a> {
    /// The name of the deployment.
    pub deployment: &'a str,
    /// What is to run.
    pub target: &'a Revision,
    /// What becomes of main functions that serve when others are to follow them.
    pub strategy: RolloutStrategy,
    /// Main functions that start now find their certificates.
    pub certified: bool,
    /// What main functions were told.
    pub table: &'a RoutingTable,
    /// Every pod of a function, those of earlier deployments of the same name included.
    pub pods: &'a [PodView],
    /// Functions of all other deployments.
    pub others: Silence,
    /// When.
    pub now: Timestamp,
}

/// What is to be done.
#[derive(Debug, Clone, Default, PartialEq)]
pub struct Rollout {
    /// Pods to be made.
    pub create: Vec<Creation>,
    /// Pods to be deleted.
    pub delete: Vec<Deletion>,
    /// What main functions are to be told from now on; none: no change.
    pub table: Option<RoutingTable>,
    /// Why functions that seem to be lost are left alone.
    pub held: Option<Trouble>,
    /// When to look again at the latest, where only time has to pass.
    pub look_again: Option<Timestamp>,
    /// Whether everything is as it is to be.
    pub settled: bool,
}

/// A pod to be made.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Creation {
    /// Index into the functions of the target.
    pub function: usize,
    /// Which replica.
    pub replica: u32,
    /// How many filled the place before.
    pub incarnation: u32,
    /// What was wrong with the one before.
    pub instead_of: Option<Trouble>,
}

/// A pod to be deleted.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Deletion {
    /// Its name.
    pub name: String,
    /// Its identity: another one of the same name is not meant.
    pub uid: String,
    /// Seconds that it has to end, where that is not what it was made with.
    pub grace_seconds: Option<u32>,
}

/// Identity of a revision: its plan in one shape.
pub fn revision_hash(revision: &Revision) -> Result<String, serde_json::Error> {
    let identities: Vec<&str> = revision.functions().map(|function| function.identity.as_str()).collect();
    digest(&(&revision.plan, identities))
}

/// What is to be done now.
///
/// # Errors
/// A value cannot be written as JSON.
pub fn step(scene: Scene<'_>) -> Result<Rollout, serde_json::Error> {
    let mut steps = Rollout::default();
    let mut replacements = Replacements::of(scene);
    for (index, function) in scene.target.functions().enumerate() {
        if function.hosted.is_none() && waits_for_others(scene) {
            continue;
        }
        for replica in 0..function.most() {
            fill(scene, index, function, replica, &mut replacements, &mut steps);
        }
    }
    steps.held = replacements.held;
    let table = routing(scene)?;
    let leftovers = remove_surplus(scene, table.as_ref().unwrap_or(scene.table), &mut steps);
    for pod in scene.pods {
        steps.look_again_at(pod.faulty_at);
    }
    let functions: Vec<&Function> = scene.target.functions().collect();
    let is_extra = |creation: &Creation| {
        functions.get(creation.function).is_some_and(|it| creation.replica >= it.replicas)
    };
    steps.settled = steps.create.iter().all(is_extra)
        && steps.delete.is_empty()
        && table.is_none()
        && leftovers == 0
        && steps.look_again.is_none()
        && everything_serves(scene);
    steps.table = table;
    Ok(steps)
}

impl Rollout {
    fn look_again_at(&mut self, at: Option<Timestamp>) {
        self.look_again = match (self.look_again, at) {
            (Some(known), Some(at)) => Some(known.min(at)),
            (known, at) => known.or(at),
        };
    }

    fn remove(&mut self, pod: &PodView) {
        let grace_seconds = pod.fault.as_ref().map(|_| FAULTY_GRACE_SECONDS);
        self.delete.push(Deletion { name: pod.name.to_string(), uid: pod.uid.clone(), grace_seconds });
    }
}

/// Whether main functions of the target start when those of other revisions have ended.
fn waits_for_others(scene: Scene<'_>) -> bool {
    let identity = &scene.target.main.identity;
    // On a node that is lost, a pod is listed for ever: what is past its end holds nothing up.
    let there = scene.pods.iter().filter(|pod| pod.ends_by.is_none_or(|end| scene.now < end));
    let mut others = there.filter(|pod| pod.owned && pod.is_main && pod.identity != *identity);
    scene.strategy == RolloutStrategy::Recreate && others.next().is_some()
}

/// Whether all that main functions of the target would call is ready.
fn remote_functions_are_ready(scene: Scene<'_>) -> bool {
    scene.target.remote.iter().all(|function| {
        filling(scene, function).filter(|pod| pod.ready).count() >= function.replicas as usize
    })
}

/// Sees to it that one place is filled by one sound pod.
fn fill(
    scene: Scene<'_>,
    index: usize,
    function: &Function,
    replica: u32,
    replacements: &mut Replacements,
    steps: &mut Rollout,
) {
    let place = function.place(scene.deployment, replica);
    let there: Vec<&PodView> = scene.pods.iter().filter(|pod| pod.name.place == place).collect();
    let best = there.iter().filter(|pod| pod.is_sound()).max_by_key(|pod| (pod.ready, pod.name.incarnation));
    // What is wrong goes when something better is there, or comes.
    let remove_others = |steps: &mut Rollout| {
        let others = there.iter().filter(|pod| pod.owned && pod.ends_by.is_none());
        others.filter(|pod| best.is_none_or(|best| best.uid != pod.uid)).for_each(|pod| steps.remove(pod));
    };
    if best.is_some() {
        return remove_others(steps);
    }
    // What others have put there says nothing about how many there were.
    let ours = there.iter().filter(|pod| pod.owned && pod.name.is_counted());
    let newest = ours.max_by_key(|pod| pod.name.incarnation);
    let faulty = newest.filter(|pod| pod.ends_by.is_none());
    if let Some(faulty) = faulty {
        let not_before = faulty.created.checked_add(pause(faulty.name.incarnation)).unwrap_or(scene.now);
        if scene.now < not_before {
            return steps.look_again_at(Some(not_before));
        }
    }
    if faulty.is_some_and(|faulty| !replacements.may_replace(faulty)) {
        return;
    }
    // Names of pods that are on their way out are still taken.
    let taken = there.iter().map(|pod| pod.name.incarnation).collect();
    steps.create.push(Creation {
        function: index,
        replica,
        incarnation: next_incarnation(newest.map(|pod| pod.name.incarnation), &taken),
        instead_of: faulty.and_then(|pod| pod.fault.clone()),
    });
    remove_others(steps);
}

/// How long a pod must have been there before it is replaced: the first one may go at once.
pub fn pause(incarnation: u32) -> SignedDuration {
    match incarnation {
        0 => SignedDuration::ZERO,
        more => {
            let doubled = 2_i32.saturating_pow(more - 1);
            FIRST_PAUSE.checked_mul(doubled).unwrap_or(LONGEST_PAUSE).min(LONGEST_PAUSE)
        }
    }
}

/// The pods that fill the places of a function.
fn filling<'a>(scene: Scene<'a>, function: &'a Function) -> impl Iterator<Item = &'a PodView> {
    scene.pods.iter().filter(move |pod| {
        pod.is_sound()
            && pod.function == function.name
            && pod.identity == function.identity
            && pod.replica < function.most()
            && pod.name.place == function.place(scene.deployment, pod.replica)
    })
}

/// The table that is to be in force, where that is another one.
fn routing(scene: Scene<'_>) -> Result<Option<RoutingTable>, serde_json::Error> {
    if !numbers_are_known(scene) {
        return Ok(None);
    }
    let mut table = RoutingTable { spoiled: false, ..scene.table.clone() };
    let identity = &scene.target.main.identity;
    if let Some(generation) = next_generation(scene)? {
        table.entries.insert(identity.clone(), generation);
    } else if took_over(scene) {
        table.entries.retain(|known, _| known == identity);
    }
    // Nobody is left to be told.
    let exists =
        |known: &String| scene.pods.iter().any(|pod| pod.is_main && pod.owned && pod.identity == *known);
    table.entries.retain(|known, _| known == identity || exists(known));
    Ok((table != *scene.table).then_some(table))
}

/// Whether a number that was never used can be told: where the durable copy was lost or spoiled, only main
/// functions know which ones were.
fn numbers_are_known(scene: Scene<'_>) -> bool {
    let is_whole = !scene.table.entries.is_empty() && !scene.table.spoiled;
    let mut mains = scene.pods.iter().filter(|pod| pod.owned && pod.is_main && pod.fault.is_none());
    is_whole || mains.all(|pod| !pod.ready || pod.in_force.is_some())
}

/// The generation for main functions of the target, where the present one does not do.
fn next_generation(scene: Scene<'_>) -> Result<Option<Generation>, serde_json::Error> {
    let present = scene.table.entries.get(&scene.target.main.identity);
    let revision = revision_hash(scene.target)?;
    let same_revision = present.filter(|present| present.revision == revision);
    let mut endpoints = Vec::new();
    let mut groups = Vec::new();
    for function in &scene.target.remote {
        let group = match &function.hosted {
            Some(Hosted::Group(sets)) => {
                groups.push(format_listing(sets));
                Some(groups.len() - 1)
            }
            Some(Hosted::Layer(_)) | None => None,
        };
        let usable = filling(scene, function).filter(|pod| {
            // One that falters is not taken out at once: its callers know what to do meanwhile.
            let routed = || same_revision.is_some_and(|present| is_routed(present, pod));
            pod.ready || routed()
        });
        let routed: Vec<RoutedPod> = usable.filter_map(|pod| routed_pod(function, group, pod)).collect();
        // A revision begins as a whole, less what sleeps. Later its main functions do with what there is, but a layer or
        // group of which nothing is left stays as it is: they serve its experts themselves meanwhile. So they do for what
        // was asleep until it is there.
        let was_routed = |present: &Generation| {
            let mut routed = present.endpoints.iter();
            routed.any(|pod| is_of(scene, function, pod))
        };
        let enough = match same_revision {
            Some(present) => usize::from(function.replicas > 0 && was_routed(present)),
            None => function.replicas as usize,
        };
        if routed.len() < enough {
            return Ok(None);
        }
        endpoints.extend(routed);
    }
    endpoints.sort();
    let remote = format_listing(&scene.target.remote_sets());
    // One that is further than it was told, or as far with other content, follows somebody else.
    let overruled = |present: &Generation| {
        let mut mains = scene.pods.iter().filter(|pod| pod.owned && pod.is_main);
        mains.any(|pod| {
            pod.identity == scene.target.main.identity
                && pod.in_force >= Some(present.number)
                && !pod.acts_on(present)
        })
    };
    let stands = same_revision.is_some_and(|present| {
        present.endpoints == endpoints
            && present.remote == remote
            && present.groups == groups
            && !overruled(present)
    });
    if stands {
        return Ok(None);
    }
    let in_force = scene.pods.iter().filter(|pod| pod.owned).filter_map(|pod| pod.in_force).max();
    Ok(Some(Generation {
        number: scene.table.newest().max(in_force.unwrap_or(0)).saturating_add(1),
        plan: scene.target.plan.clone(),
        revision,
        remote,
        endpoints,
        groups,
    }))
}

fn is_routed(generation: &Generation, pod: &PodView) -> bool {
    let name = pod.name.to_string();
    generation.endpoints.iter().any(|routed| routed.pod == name)
}

/// Whether the pod that main functions were told of fills, or filled, a place of `function`.
fn is_of(scene: Scene<'_>, function: &Function, routed: &RoutedPod) -> bool {
    let places = |place: &str| place.rsplit_once('-').map(|(places, _replica)| places.to_owned());
    let filled = PodName::parse(&routed.pod).and_then(|name| places(&name.place));
    filled.is_some() && filled == places(&function.place(scene.deployment, 0))
}

fn routed_pod(function: &Function, group: Option<usize>, pod: &PodView) -> Option<RoutedPod> {
    let layers = match &function.hosted {
        Some(Hosted::Layer(set)) => vec![set.layer],
        Some(Hosted::Group(_)) | None => Vec::new(),
    };
    Some(RoutedPod { pod: pod.name.to_string(), address: pod.expert_address()?, layers, group })
}

/// Whether main functions of the target serve, all of them; those because of load as far as others serve that would end, and
/// nothing keeps them.
fn took_over(scene: Scene<'_>) -> bool {
    let main = &scene.target.main;
    let Some(generation) = scene.table.entries.get(&main.identity) else { return false };
    let serving = filling(scene, main).filter(|pod| pod.ready && pod.acts_on(generation)).count();
    let kept = filling(scene, main).filter(|pod| !pod.ready && pod.trouble.is_some()).count();
    let others = scene.pods.iter().filter(|pod| pod.owned && pod.is_main && pod.is_sound() && pod.ready);
    let others = others.filter(|pod| pod.identity != main.identity).count();
    serving >= main.replicas as usize && serving + kept >= others.min(main.most() as usize)
}

/// Removes what is neither wanted nor used. Returns how many pods are still used, but not wanted.
fn remove_surplus(scene: Scene<'_>, table: &RoutingTable, steps: &mut Rollout) -> usize {
    let wanted = |pod: &PodView| {
        scene.target.functions().any(|function| {
            (0..function.most()).any(|replica| pod.name.place == function.place(scene.deployment, replica))
        })
    };
    let is_free = told(scene, table);
    let mut used = 0;
    for pod in scene.pods.iter().filter(|pod| pod.owned && pod.ends_by.is_none() && !wanted(pod)) {
        let in_use = match (&pod.fault, pod.is_main) {
            (Some(_), _) => false,
            // Serves until those of the target do, or could.
            (None, true) => {
                let gives_way = scene.strategy == RolloutStrategy::Recreate
                    && scene.certified
                    && remote_functions_are_ready(scene);
                pod.identity != scene.target.main.identity
                    && table.entries.contains_key(&pod.identity)
                    && !gives_way
            }
            (None, false) => !is_free || table.leads_to(&pod.name.to_string()),
        };
        if in_use {
            used += 1;
        } else {
            steps.remove(pod);
        }
    }
    used
}

/// Whether every main function acts on what stands in the table: only then is a remote function that is
/// not in it unused.
fn told(scene: Scene<'_>, table: &RoutingTable) -> bool {
    let mains = scene.pods.iter().filter(|pod| pod.owned && pod.is_main);
    // On a node that is lost, a pod is listed for ever.
    let mut present = mains.filter(|pod| pod.ends_by.is_none_or(|end| scene.now < end));
    present.all(|pod| {
        let Some(generation) = table.entries.get(&pod.identity).filter(|_| pod.ends_by.is_none()) else {
            // It has been told of nothing, or is on its way out and finishes its requests.
            return pod.ends_by.is_none() && pod.in_force == Some(0);
        };
        match pod.in_force {
            Some(0) => true,
            Some(_) => pod.acts_on(generation),
            // It has not been up to be told anything.
            None => !pod.ready,
        }
    })
}

/// Whether everything that is to run does, and nothing else is told of.
fn everything_serves(scene: Scene<'_>) -> bool {
    let all_ready = scene.target.functions().all(|function| {
        filling(scene, function).filter(|pod| pod.ready).count() >= function.replicas as usize
    });
    let only_target = scene.table.entries.keys().all(|identity| *identity == scene.target.main.identity);
    all_ready && only_target && took_over(scene)
}

/// The main functions that are spoken with, each with the generation that it is to have in force.
pub fn orders<'a>(
    table: &'a RoutingTable,
    pods: &'a [PodView],
) -> impl Iterator<Item = (&'a PodView, Option<&'a Generation>)> {
    let mains = pods.iter().filter(|pod| pod.is_main && pod.is_sound() && pod.ip.is_some());
    mains.map(|pod| (pod, table.entries.get(&pod.identity)))
}
