set -u
mkdir -p /tmp/fv/fairvar/models
cp src/fairvar/models/mobilenet.py src/fairvar/models/norm.py /tmp/fv/fairvar/models/
cp src/fairvar/errors.py src/fairvar/tree.py /tmp/fv/fairvar/
touch /tmp/fv/fairvar/__init__.py /tmp/fv/fairvar/models/__init__.py
cp benchmarks/heavy_step.py /tmp/fv/
cd /tmp/fv; export PYTHONPATH=/tmp/fv
A=step,forward_over_reverse,reverse_over_forward,reverse_over_reverse
nvidia-smi --query-gpu=name,driver_version --format=csv,noheader
(timeout 540 python3 heavy_step.py --forms step --out $OUT/step.json > $OUT/step.log 2>&1) &
(timeout 560 python3 heavy_step.py --forms forward_over_reverse --out $OUT/for.json > $OUT/for.log 2>&1) &
(timeout 560 python3 heavy_step.py --forms reverse_over_forward --out $OUT/rof.json > $OUT/rof.log 2>&1) &
(timeout 300 python3 heavy_step.py --small --forms $A --out $OUT/small.json > $OUT/small.log 2>&1) &
wait
for f in small step for rof; do echo "== $f"; tail -c 2500 $OUT/$f.log; done
