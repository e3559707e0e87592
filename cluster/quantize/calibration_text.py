"""Text by which quantisation learns what a model's matrices read.

Origin: written for this repository, under its licence. It has no sentence in common with the text
that quality is judged by (`cluster.bench.held_out`), and mixes what a general model meets: prose,
explanation, instructions, dialogue, lists, tables, arithmetic, code and configuration.
"""

CALIBRATION = """\
The photosynthesis of plants turns water and carbon dioxide into sugar and oxygen, using the energy
of sunlight. It takes place in the chloroplasts, small green bodies inside the cells of leaves. The
green colour comes from chlorophyll, a pigment that absorbs red and blue light and reflects the
rest. In a first series of reactions, light splits water molecules; the oxygen is released, and the
energy is stored in two carrier molecules called ATP and NADPH. In a second series, known as the
Calvin cycle, these carriers supply the energy for building sugar from carbon dioxide. The second
series does not need light directly, but it stops soon after sunset, because the carriers run out.
Almost all life on Earth depends on this process, either because organisms carry it out themselves
or because they eat something that does.

Question: What is the capital of Australia?
Answer: The capital of Australia is Canberra. Many people expect it to be Sydney, which is the
largest city, or Melbourne, which was the seat of government until 1927. Canberra was planned as a
compromise between the two and lies about 280 kilometres southwest of Sydney.

Question: How many sides does a hexagon have, and what do its angles add up to?
Answer: A hexagon has six sides. The sum of the interior angles of a polygon with n sides is
(n - 2) x 180 degrees, so for a hexagon it is 4 x 180 = 720 degrees. In a regular hexagon each
angle is therefore 120 degrees.

Question: Write a short poem about autumn.
Answer:
The maple lets its letters go,
Each one addressed to ground below;
The morning reads them, red and brown,
And files them gently through the town.

from collections import OrderedDict


class LRUCache:
    \"\"\"A cache that forgets what was used least recently.\"\"\"

    def __init__(self, capacity: int) -> None:
        if capacity <= 0:
            raise ValueError("capacity must be positive")
        self.capacity = capacity
        self._items: OrderedDict[str, object] = OrderedDict()

    def get(self, key: str, default=None):
        if key not in self._items:
            return default
        self._items.move_to_end(key)
        return self._items[key]

    def put(self, key: str, value: object) -> None:
        self._items[key] = value
        self._items.move_to_end(key)
        while len(self._items) > self.capacity:
            self._items.popitem(last=False)


if __name__ == "__main__":
    cache = LRUCache(2)
    cache.put("a", 1)
    cache.put("b", 2)
    print(cache.get("a"))  # 1
    cache.put("c", 3)
    print(cache.get("b"))  # None, it was the oldest

The history of the bicycle begins in 1817, when Karl von Drais built a wooden machine with two
wheels in a line and no pedals. The rider sat on it and pushed with his feet. It was meant as a
substitute for horses, many of which had starved in the bad harvests of the previous year. Pedals
were added to the front wheel in Paris in the 1860s. Because one turn of the pedals was one turn of
the wheel, makers built larger and larger front wheels to gain speed, until the rider sat so high
that a small stone could throw him over the handlebars. In 1885 John Kemp Starley introduced the
safety bicycle, with two equal wheels and a chain that drove the rear one. Three years later, John
Boyd Dunlop made the pneumatic tyre. Within a decade millions of people owned a bicycle. It changed
where they could work, whom they could marry, and what women wore.

How to change a flat tyre on a car.
1. Park on level ground away from traffic, switch on the hazard lights and apply the handbrake.
2. Take out the spare wheel, the jack and the wrench. Loosen the wheel nuts by half a turn while the
   wheel is still on the ground.
3. Place the jack under the point shown in the manual and raise the car until the wheel is clear.
4. Remove the nuts, keep them together, and pull the wheel towards you.
5. Fit the spare wheel, tighten the nuts by hand, lower the car, then tighten them firmly in the
   order of a star.
6. Check the pressure at the next petrol station. A temporary spare must not be driven faster than
   80 km/h.

"I don't understand why it has to be tonight," said Clara. She had her coat on already.

"Because tomorrow he'll be gone," her brother answered, "and he is the only one who saw the letter
before it was burned. You can stay here if you like. I won't be angry."

"You will. You'll say that you aren't, and then you'll be quiet for three days." She looked for her
gloves, found one of them, and gave up on the other. Outside, the rain had turned to sleet. The
streetlights were ringed with yellow, and nobody was about except a man who was trying to persuade
a dog to come out from under a parked van. "What will you ask him?" she said after a while.

"Whether it was signed," he said. "Everything else I know."

The quadratic equation ax^2 + bx + c = 0 has the solutions x = (-b ± sqrt(b^2 - 4ac)) / (2a). The
expression under the root is called the discriminant. If it is positive, there are two real
solutions; if it is zero, there is one; if it is negative, there are two complex ones. For example,
let a = 2, b = -4 and c = -6. Then the discriminant is 16 + 48 = 64, its root is 8, and the
solutions are (4 + 8) / 4 = 3 and (4 - 8) / 4 = -1. Check: 2 * 9 - 4 * 3 - 6 = 18 - 12 - 6 = 0, and
2 * 1 + 4 - 6 = 0.

Dear Ms Novak,

Thank you for your order no. 48213 of 14 May. Unfortunately, two of the five items (the blue kettle
and the set of six glasses) are out of stock, and our supplier does not expect a delivery before the
end of June. We can send you the other three at once, without charging for a second shipment later,
or cancel the missing items and refund £37.50 to your card. Please let us know which you prefer by
replying to this message. We are sorry for the inconvenience.

Kind regards,
Peter Lang
Customer Service

| Country | Population (millions) | Area (1000 km2) | Capital |
|---------|-----------------------|-----------------|---------|
| France  | 68.4                  | 551.7           | Paris   |
| Spain   | 48.6                  | 506.0           | Madrid  |
| Poland  | 37.6                  | 312.7           | Warsaw  |
| Greece  | 10.4                  | 132.0           | Athens  |

According to the table, France has the largest population of the four countries and also the largest
area. Spain is almost as large but has about twenty million fewer inhabitants. Greece is the
smallest in both respects. The population density of Poland is roughly 120 people per square
kilometre, which is close to that of France.

Vaccines prepare the immune system for an infection without causing the disease. They contain a
harmless part of the virus or bacterium, a weakened or killed form of it, or, in the case of mRNA
vaccines, instructions that let our own cells produce such a part for a short time. The immune
system recognises the foreign protein, makes antibodies against it and keeps memory cells. When the
real pathogen arrives, these cells respond within hours rather than days. Side effects such as a
sore arm, fever or fatigue are common and usually disappear within two days. Serious reactions are
very rare; people who have had a severe allergic reaction before should talk to their doctor first.

#include <stdio.h>
#include <stdlib.h>

/* Returns the greatest common divisor of two non-negative integers. */
static unsigned long gcd(unsigned long a, unsigned long b)
{
    while (b != 0) {
        unsigned long r = a % b;
        a = b;
        b = r;
    }
    return a;
}

int main(int argc, char **argv)
{
    if (argc != 3) {
        fprintf(stderr, "usage: %s A B\\n", argv[0]);
        return EXIT_FAILURE;
    }
    printf("%lu\\n", gcd(strtoul(argv[1], NULL, 10), strtoul(argv[2], NULL, 10)));
    return EXIT_SUCCESS;
}

The city council voted on Monday to close the old market hall to cars from next spring. The decision
follows two years of argument between shopkeepers, who fear for their customers, and residents, who
complain about noise and exhaust fumes. Under the plan, deliveries will be allowed until ten in the
morning, and a new car park with 220 spaces will be built beside the railway station. The cost is
estimated at 4.6 million euros, of which the state will pay a third. "It is not perfect, but it is
the first proposal that everyone dislikes equally," said the mayor, Anna Brandt, after the vote.
The opposition announced that it would examine whether the decision can be challenged in court.

Once upon a time there was a miller who had three sons, a mill, a donkey and a cat. When he died the
eldest took the mill, the second took the donkey, and nothing was left for the youngest but the cat.
"My brothers can earn their bread together," he sighed, "but when I have eaten my cat and made a
muff of his skin, I shall have to starve." The cat, who had heard everything and pretended to have
heard nothing, replied with a serious face: "Do not worry, master. Give me a bag and have a pair of
boots made for me, and you will see that you have not been treated as badly as you think."

Machine learning models are usually divided into three kinds. In supervised learning, the model is
given examples together with the correct answers, and learns to predict the answers for new
examples; classification and regression belong to this kind. In unsupervised learning there are no
answers, and the model looks for structure, such as clusters or a small number of directions that
explain most of the variation. In reinforcement learning, an agent acts in an environment and
receives rewards; it must find out by trial and error which actions lead to the greatest reward in
the long run. Large language models combine these: they are first trained to predict the next word
of a text, which needs no labels, then tuned on examples of good answers, and finally adjusted with
feedback from people or from other models.

Here are five tips for a better night's sleep:

- **Keep regular hours.** Go to bed and get up at the same time every day, even at weekends.
- **Avoid screens** for an hour before bed; their light delays the hormone melatonin.
- **Be careful with caffeine.** Half of it is still in your blood five to six hours later.
- **Keep the bedroom cool and dark.** About 18 °C suits most people.
- **Move during the day**, but not shortly before bed.

If you lie awake for more than twenty minutes, get up, do something quiet, and return when you are
tired. If the problem lasts longer than a month, ask a doctor for advice.

services:
  web:
    image: example/shop:1.14.2
    ports:
      - "8080:80"
    environment:
      DATABASE_URL: postgres://shop:secret@db:5432/shop
      LOG_LEVEL: info
    depends_on: [db]
  db:
    image: postgres:16
    volumes:
      - data:/var/lib/postgresql/data
volumes:
  data: {}

To start the application, run `docker compose up -d` in the directory that contains the file, then
open http://localhost:8080 in a browser. If port 8080 is already in use, change the first number in
the line under `ports`. Logs can be followed with `docker compose logs -f web`. The data survives
when the containers are removed, because it is kept in a named volume.

{"name": "Lena", "age": 34, "languages": ["German", "English", "Portuguese"], "address": {"street":
"Hauptstraße 5", "city": "Köln", "zip": "50667"}, "active": true, "score": 87.25, "manager": null}

A train leaves the station at 9:15 and travels at 80 kilometres per hour. A second train leaves the
same station at 9:45 on the same line and travels at 120 kilometres per hour. When does the second
train catch up? By 9:45 the first train is 40 kilometres ahead. The second train gains 120 - 80 = 40
kilometres each hour, so it needs exactly one hour. It catches up at 10:45, at a distance of 120
kilometres from the station.

The Roman Republic was governed by elected magistrates, of whom the two consuls were the most
powerful. They held office for a single year, and each could veto the other. The Senate, a council
of former magistrates, had no formal power to make laws, but its advice was rarely ignored, and it
controlled the treasury. The people met in assemblies in which the votes of the rich counted for
more. In times of great danger a dictator could be appointed for six months. This balance broke down
in the first century BC, when generals whose soldiers were loyal to them rather than to the state
fought one another for supremacy. After the murder of Julius Caesar in 44 BC his adopted son
Octavian defeated all rivals, and in 27 BC he received the title Augustus. He kept the forms of the
Republic and ended its substance.

SELECT c.name, COUNT(o.id) AS orders, SUM(o.total) AS revenue
FROM customers AS c
LEFT JOIN orders AS o ON o.customer_id = c.id AND o.created_at >= DATE '2023-01-01'
GROUP BY c.name
HAVING COUNT(o.id) > 3
ORDER BY revenue DESC
LIMIT 20;

The query lists the twenty customers with the highest revenue among those who placed more than three
orders since the beginning of 2023. The condition on the date belongs to the join and not to a WHERE
clause; otherwise customers without orders would drop out before they are counted. In this case it
makes no difference, because HAVING removes them anyway.

User: Can you explain the difference between weather and climate?
Assistant: Of course! Weather is what happens in the atmosphere at a particular place and time: it
may rain this afternoon, or be unusually warm tomorrow. Climate is the average of the weather over a
long period, usually thirty years, together with how much it varies. A popular saying puts it this
way: climate is what you expect, weather is what you get.
User: So does one cold winter mean that the climate isn't warming?
Assistant: No. A single winter is weather. To see a change in the climate you have to compare
averages over decades, and over large areas. A region can have a cold winter in a year that is, for
the planet as a whole, among the warmest ever measured.
User: Thanks, that makes sense.
Assistant: You're welcome! Let me know if you have any other questions.

The human heart beats about 100,000 times a day and pumps some 7,000 litres of blood. It consists of
four chambers. The right atrium receives blood from the body, and the right ventricle sends it to
the lungs, where it gives off carbon dioxide and takes up oxygen. It returns to the left atrium, and
the left ventricle, whose wall is the thickest, drives it into the aorta and through the body.
Valves between the chambers prevent the blood from flowing back; the sounds that a doctor hears are
those of the valves closing. The rhythm is set by a small group of cells in the right atrium, the
sinus node, which needs no signal from the brain but can be sped up or slowed down by it.

def word_count(text):
    counts = {}
    for word in text.lower().split():
        word = word.strip(".,;:!?\\"'()")
        if word:
            counts[word] = counts.get(word, 0) + 1
    return sorted(counts.items(), key=lambda item: (-item[1], item[0]))

This function counts how often each word appears in a text. It converts the text to lower case,
splits it at white space, removes punctuation from both ends of every word, and skips what is empty
afterwards. The result is a list of pairs, the most frequent word first; words that are equally
frequent are in alphabetical order. The running time is O(n log n) because of the sorting.

Le petit café au coin de la rue ouvre à sept heures. Chaque matin, Madame Dubois y boit un grand
crème et lit le journal avant d'aller au travail. Der Zug nach Hamburg hat heute leider zwanzig
Minuten Verspätung; wir bitten um Ihr Verständnis. El perro de mi vecina ladra toda la noche, y
nadie sabe qué hacer.

Economists distinguish between nominal and real interest rates. The nominal rate is the one that the
bank quotes. The real rate takes inflation into account: if a savings account pays 3 percent and
prices rise by 2 percent, the saver's purchasing power grows by only about 1 percent. When inflation
is higher than the nominal rate, the real rate is negative, and money in the account loses value
although the balance increases. Central banks raise their rates when inflation is too high. Loans
become more expensive, firms invest less, households spend less, and prices rise more slowly. The
effect takes a year or more to be felt, which is why the decision must rest on forecasts.

Ingredients for twelve pancakes: 250 g flour, 2 eggs, half a litre of milk, a pinch of salt, one
tablespoon of sugar, and a little oil for the pan. Whisk the eggs with the milk, add flour, salt and
sugar, and beat until the batter is smooth. Let it rest for fifteen minutes. Heat a non-stick pan
over medium heat, brush it with oil, pour in a ladle of batter and tilt the pan so that it spreads
evenly. When the edges come loose, after a minute or so, turn the pancake and bake the other side
for half a minute. Serve with jam, with sugar and cinnamon, or with cheese and ham.

Mount Everest, on the border between Nepal and China, is 8,849 metres high. It was first climbed on
29 May 1953 by Edmund Hillary and Tenzing Norgay. Above 8,000 metres the air holds so little oxygen
that the human body can no longer recover; climbers call it the death zone. Most use bottled oxygen,
but in 1978 Reinhold Messner and Peter Habeler reached the summit without it. Today several hundred
people stand on the top each year, and on fine days in May there are queues on the ridge.

ERROR 2024-03-11 08:42:17,093 [worker-3] payment.client: request failed after 3 attempts
Traceback (most recent call last):
  File "/srv/app/payment/client.py", line 118, in charge
    response = self.session.post(url, json=body, timeout=5.0)
  File "/usr/lib/python3.11/site-packages/requests/sessions.py", line 637, in post
    return self.request("POST", url, data=data, json=json, **kwargs)
requests.exceptions.ReadTimeout: HTTPSConnectionPool(host='api.example.com', port=443): Read timed
out. (read timeout=5.0)

The log shows that the payment service did not answer within five seconds, three times in a row.
Since the connection itself was established, the network is probably fine, and the other side is
slow or overloaded. Before raising the timeout, find out whether the charge was carried out: if the
request is repeated without an idempotency key, the customer may pay twice.

It was the summer in which nothing happened. The factory had closed in April, and the men sat in the
gardens as if it were Sunday, except that they did not talk. My grandmother said that a town is like
a clock: you notice the ticking only when it stops. She taught me to play chess on the kitchen
table, with a coin for the missing rook, and she never let me win. In August I beat her for the
first time. She looked at the board for a long while, tipped her king over with one finger, and went
to make tea. Years later I understood that she had seen the mistake, and that she had made it on
purpose, because the following day I was going to leave for the city.

Newton's three laws of motion can be stated as follows. First, a body remains at rest or moves in a
straight line at constant speed unless a force acts on it. Second, the acceleration of a body is
proportional to the force and inversely proportional to its mass: F = m * a. Third, if one body
exerts a force on another, the second exerts an equal and opposite force on the first. A rocket, for
example, moves forward because it throws gas backwards; it does not need any air to push against.

const express = require("express");
const app = express();
app.use(express.json());

let nextId = 1;
const todos = new Map();

app.get("/todos", (req, res) => res.json([...todos.values()]));

app.post("/todos", (req, res) => {
  const { title } = req.body;
  if (typeof title !== "string" || title.trim() === "") {
    return res.status(400).json({ error: "title is required" });
  }
  const todo = { id: nextId++, title: title.trim(), done: false };
  todos.set(todo.id, todo);
  res.status(201).json(todo);
});

app.listen(3000, () => console.log("listening on port 3000"));

Summarize the following text in one sentence: Bees are important pollinators. Around three quarters
of the crops that people eat depend at least in part on insects that carry pollen from one flower to
another. In many regions the number of wild bees has fallen because of pesticides, disease and the
loss of flowering meadows. Gardeners can help by planting native flowers, leaving some ground bare
for nests and avoiding chemicals.
Summary: Because most food crops depend on pollinators whose numbers are falling, gardeners should
support bees with native flowers, nesting places and fewer chemicals.

Whales are mammals whose ancestors lived on land about fifty million years ago. They breathe air,
are warm-blooded and feed their young with milk. Toothed whales, such as dolphins and sperm whales,
hunt by echolocation; baleen whales filter small animals out of the water with plates of horn. The
blue whale is the largest animal that has ever lived. It can reach a length of thirty metres and a
weight of 150 tonnes, and its heart is about as heavy as a small car. In spite of its size it feeds
almost entirely on krill, of which it may eat four tonnes a day.

The contract begins on 1 September and is concluded for an indefinite period. Either party may
terminate it with three months' notice to the end of a quarter. Notice must be given in writing. The
monthly rent is 940 euros plus 180 euros for heating and water, payable in advance by the third
working day of each month. The tenant pays a deposit of two months' rent, which the landlord keeps
in a separate account and returns, with interest, no later than six months after the end of the
contract, less any justified claims. Pets other than small animals require the landlord's consent.

Translate into French: "Where is the nearest pharmacy?" -> "Où est la pharmacie la plus proche ?"
Translate into German: "I would like a table for two." -> "Ich hätte gern einen Tisch für zwei."
Translate into Spanish: "How much does it cost?" -> "¿Cuánto cuesta?"

Probability of at least one six in four throws of a die: the probability of no six in one throw is
5/6, so for four throws it is (5/6)^4 = 625/1296, about 0.482. The probability of at least one six
is therefore 1 - 0.482 = 0.518, slightly more than one half. For a double six in twenty-four throws
of two dice it is 1 - (35/36)^24 = 0.491, slightly less than one half. The Chevalier de Méré is said
to have noticed the difference at the gaming table and to have asked Pascal for the reason.
"""
