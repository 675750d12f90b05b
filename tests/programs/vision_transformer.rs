//! A ViT that classifies images by their brighter half.

use shardgrad::prelude::*;

const ROWS: usize = 6;
const SIDE: usize = 8;
const PATCH: usize = 4;
const PATCHES: usize = (SIDE / PATCH) * (SIDE / PATCH);
const WIDTH: usize = 16;
const CLASSES: usize = 4;

module! { struct Block { ln_1: LayerNorm, attn: Attention, ln_2: LayerNorm, mlp: Mlp } }

impl Block {
    fn new() -> Block {
        Block {
            ln_1: LayerNorm::new(WIDTH),
            attn: Attention::new(WIDTH, 4).causal(false),
            ln_2: LayerNorm::new(WIDTH),
            mlp: Mlp::new(WIDTH, 4 * WIDTH),
        }
    }

    fn forward(&self, x: &Var) -> Var {
        let x = x + self.attn.forward(&self.ln_1.forward(x));
        &x + self.mlp.forward(&self.ln_2.forward(&x))
    }
}

module! {
    struct Vit { patches: Linear, class: Param, positions: Param, blocks: Vec<Block>, norm: LayerNorm, head: Linear }
}

impl Vit {
    fn new() -> Vit {
        Vit {
            patches: Linear::new(PATCH * PATCH, WIDTH),
            class: Param::new(&[1, WIDTH]).init(Init::Normal(0.02)),
            positions: Param::new(&[PATCHES + 1, WIDTH]).init(Init::Normal(0.02)),
            blocks: vec![Block::new(), Block::new()],
            norm: LayerNorm::new(WIDTH),
            head: Linear::new(WIDTH, CLASSES),
        }
    }

    /// Images `[rows, side, side]` to logits `[rows, classes]`.
    fn forward(&self, images: &Var) -> Var {
        let (rows, grid) = (images.shape()[0], SIDE / PATCH);
        let patches = images.reshape(&[rows, grid, PATCH, grid, PATCH]).permute(&[0, 1, 3, 2, 4]);
        let x = self.patches.forward(&patches.reshape(&[rows, PATCHES, PATCH * PATCH]));
        let class = self.class.on(&x).broadcast_to(&[rows, 1, WIDTH]);
        let x = Var::concat(&[&class, &x], 1) + self.positions.on(&x);
        let x = self.blocks.iter().fold(x, |x, block| block.forward(&x));
        self.head.forward(&self.norm.forward(&x.select(1, 0)))
    }
}

fn plan() -> Plan {
    let heads = Plan::new()
        .store("attn.c_attn.weight", "tp@2")
        .store("attn.c_attn.bias", "tp@1")
        .store("attn.c_proj.weight", "tp@0");
    let tensor = Plan::tensor_parallel("tp").column_parallel("mlp.c_fc").row_parallel("mlp.c_proj");
    Plan::data_parallel("dp").and(tensor.column_parallel("head")).and(heads)
}

/// The brightness of pixel `i` of all images: the half that the class names is bright.
fn pixel(i: usize) -> f64 {
    let (row, y, x) = (i / (SIDE * SIDE), i / SIDE % SIDE, i % SIDE);
    let is_bright = [y < SIDE / 2, y >= SIDE / 2, x < SIDE / 2, x >= SIDE / 2][row % CLASSES];
    f64::from(u8::from(is_bright)) + 0.1 * (i as f64).sin()
}

#[test]
fn losses_and_accuracy_do_not_depend_on_the_mesh() {
    let plan = plan();
    let found = super::same_on(["dp=2", "tp=2", "dp=3", "dp=2,tp=2"], 1e-8, |rank| {
        let model = Model::with_dtype(rank, Vit::new(), &plan, 1, DType::F64)?;
        let mut optim = AdamW::new(3e-3);
        let images = plan.batch_layout(rank.mesh(), DType::F64, &[ROWS, SIDE, SIDE])?;
        let images = Tensor::from_fn(rank, &images, pixel)?;
        let classes: Vec<i64> = (0..ROWS).map(|row| (row % CLASSES) as i64).collect();
        let classes =
            Tensor::from_global(rank, &plan.batch_layout(rank.mesh(), DType::I64, &[ROWS])?, &classes)?;
        let mut found = Vec::new();
        for _ in 0..12 {
            let tape = model.tape();
            let (images, classes) = (tape.constant(images.clone()), tape.constant(classes.clone()));
            let logits = model.forward(&images);
            let loss = cross_entropy(&logits, &classes).mean();
            loss.backward()?;
            optim.update(&model, tape.gradients())?;
            let right = logits.tensor().whole_along(1).argmax(1).eq(classes.tensor()).cast(DType::F64).mean();
            found.extend([loss.item()?, right.item()?]);
        }
        Ok(found)
    });
    let [.., loss, accuracy] = found[..] else { panic!("12 steps") };
    assert!(loss < 0.5 * found[0] && accuracy == 1.0, "{found:?}");
}
