#!/usr/bin/env bash
# on_device.sh [FOLDER]: `torchrun -m gka.train` on one GPU over NCCL: bfloat16 on float32 masters, accumulation,
# recomputed activations, a save and a resume; then every exchange of a cut layer in groups of one rank. pytest does not
# run it (it wants a card; without one it says so and takes gloo). For a build of another folder:
#   GKA_LIBRARY=/where/lib/libgka.so PYTHONPATH=$PWD/python tests/distributed/on_device.sh
set -euo pipefail
here=$(cd "$(dirname "$0")" && pwd)
folder=$(realpath -m "${1:-$(mktemp -d)}")
python=${PYTHON:-python3}
mkdir -p "$folder" && cd "$folder"
cat >recall.json <<'JSON'
{
  "model": {
    "vocab_size": 512, "hidden_size": 256, "intermediate_size": 512, "num_hidden_layers": 4,
    "num_attention_heads": 2, "num_key_value_heads": 2, "head_dim": 128, "sliding_window": 64,
    "hybrid_override_pattern": "GKA-*-GDN-SWA"
  },
  "data": {"kind": "task", "task": "mqar", "vocab_size": 512, "sizes": [{"tokens": 256, "pairs": 16}]},
  "length": 256, "batch_tokens": 4096, "accumulation": 2, "learning_rate": 1e-3, "warmup": 0, "final_learning_rate": 1,
  "steps": 12, "eval_every": 6, "eval_batches": 1, "checkpoint_every": 6, "checkpoint_activations": true
}
JSON
train() { "$python" -m torch.distributed.run --standalone --nproc-per-node 1 -m gka.train "$@"; }
rm -rf whole stopped float32
train recall.json --set output=whole --context-parallel 1 --tensor-parallel 1
train recall.json --set output=stopped --set steps=6
train stopped --resume --set steps=12
train recall.json --set output=float32 --set dtype=float32 --set steps=6
"$python" -m torch.distributed.run --standalone --nproc-per-node 1 "$here/on_device.py" "$folder"
for ranks in 1 2 4; do
  "$python" -m torch.distributed.run --standalone --nproc-per-node $ranks "$here/on_device_ring.py"
done
