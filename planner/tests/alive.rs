//! explore
#![allow(clippy::unwrap_used, clippy::expect_used, clippy::panic)]
mod engine;
mod generate;
use engine::{Setting, observe};
use generate::Random;
use remoe_planner::{Arrivals, Service, alive};

fn setting(random: &mut Random) -> Setting {
    let slots = random.whole(1, 16) as usize;
    let mains = if random.one_in(2) { 1 } else { random.whole(2, 4) as usize };
    let (first, slope) = (random.between(0.01, 0.1), random.unit());
    let step_seconds: Vec<f64> = (0..slots).map(|more| first * (1.0 + slope * more as f64)).collect();
    let steps = random.whole(5, 60) as f64;
    let prefill_seconds = first * random.between(0.5, 20.0);
    let full = slots as f64 * prefill_seconds + steps * step_seconds[slots - 1];
    let alone = prefill_seconds + steps * first;
    let most = (mains * slots) as f64 / full;
    let utilisation = if random.one_in(3) { random.between(0.001, 0.1) } else { random.between(0.1, 0.95) };
    let per_second = most * utilisation;
    let burst = if random.one_in(3) { random.between(1.0, 10.0) } else { 1.0 };
    let idle_seconds = if random.one_in(5) { None } else { Some(random.between(0.0, 3.0) * burst/ per_second) };
    let start_seconds = alone * random.between(0.0, 10.0);
    Setting { per_second, burst, idle_seconds, start_seconds, prefill_seconds, step_seconds, steps, fixed_steps: random.one_in(2), slots, mains }
}

#[test]
fn explore() {
    println!("util,burst,mains,slots,fixed,idle,lt,share,share_,cold,cold_,cw,cw_,wakes,wakes_,inf,inf_,svc,svc_,tpot,tpot_,wait,wait_,pf,slope");
    for seed in 0..240 {
        let s = setting(&mut Random::new(seed));
        let o = observe(&s, 40_000, seed + 1000);
        let a = alive(&Arrivals{per_second: s.per_second, burst: s.burst, recorded_seconds: None, idle_seconds: s.idle_seconds},
            &Service{prefill_seconds: s.prefill_seconds, step_seconds: s.step_seconds.clone(), steps: s.steps, concurrency: s.slots as u32, mains: s.mains as u32}, s.start_seconds);
        println!("{:.3},{:.1},{},{},{},{:.2},{:.2},{:.4},{:.4},{:.4},{:.4},{:.4},{:.4},{:.5},{:.5},{:.4},{:.4},{:.4},{:.4},{:.5},{:.5},{:.4},{:.4},{:.2},{:.2}", a.utilisation, s.burst, s.mains, s.slots, s.fixed_steps as u8,
            s.idle_seconds.map_or(-1.0,|w| w*s.per_second/s.burst), s.per_second*s.start_seconds,
            a.share,o.share,a.cold_share,o.cold_share,a.cold_wait_seconds,o.cold_wait_seconds,a.wakes_per_second,o.wakes_per_second,a.in_flight,o.in_flight,a.service_seconds,o.service_seconds,a.tpot_seconds,o.tpot_seconds,a.wait_seconds,o.wait_seconds, s.prefill_seconds/(s.steps*s.step_seconds[0]), if s.slots>1 {s.step_seconds[1]/s.step_seconds[0]-1.0} else {0.0});
    }
}
